"""The chat page: the files of `page/` put together into one, and the policy that allows only those.

There is no build step. In `page/index.html` a comment that names files, `<!-- a.js b.js -->`,
stands for their text in one script or style element. The policy names the SHA-256 of each such
element, so that the browser runs nothing else, whatever a model writes.
"""

import base64
import hashlib
import re
from pathlib import Path

_FOLDER = Path(__file__).parent
_FILES = re.compile(r"<!-- ((?:\w+\.(?:js|css) ?)+)-->")
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    # Makes innerHTML and its kin throw, for the page's own code too.
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


def page_html() -> str:
    """Return the whole page. It loads nothing, and connects only to the server it came from."""
    return _FILES.sub(lambda found: _element(found[1].split()), _text("index.html"))


def page_csp() -> str:
    """Return the Content-Security-Policy header of `page_html`."""
    # Computed from the same text: a hash that does not match makes the browser refuse the script.
    page = page_html()
    hashes = {tag: _hashes(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)) for tag in _TAGS}
    return _POLICY.format(**hashes)


_TAGS = ("script", "style")


def _element(names: list[str]) -> str:
    tag = "style" if names[0].endswith(".css") else "script"
    text = "\n".join(_text(name) for name in names)
    assert f"</{tag}" not in text, f"{names} would end their own element"
    if tag == "script":
        text = f'"use strict";\n(() => {{\n{text}}})();\n'  # names of its own, not of the window
    return f"<{tag}>{text}</{tag}>"


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hashes(elements: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in elements)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
