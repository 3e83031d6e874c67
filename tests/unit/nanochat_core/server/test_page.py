"""The page that is put together at start, and its policy; tests/integration/browser uses it."""

import base64
import hashlib
import re

import pytest

from nanochat_core.server.page import page
from nanochat_core.server.page.page import page_csp, page_html

ELEMENT = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def test_the_policy_allows_the_pages_own_elements_and_no_others():
    allowed = re.findall(r"'sha256-([^']+)'", page_csp())
    texts = [text.encode() for _, text in ELEMENT.findall(page_html())]
    assert allowed == [
        base64.b64encode(hashlib.sha256(text).digest()).decode()
        for text in sorted(texts, key=lambda text: text.lstrip().startswith(b":root"))
    ]
    assert "unsafe" not in page_csp()
    assert "default-src 'none'" in page_csp()
    assert "require-trusted-types-for 'script'" in page_csp()


def test_nothing_is_loaded_and_nothing_is_parsed_as_html():
    html = page_html()
    assert not re.search(r"<!-- [\w.]+ ", html)
    assert not re.search(r"(?:src|href)=[\"']?(?!#|data:)\w", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", html)
    assert not re.search(r"\son\w+=[\"']|\sstyle=[\"']", html)
    addresses = set(re.findall(r"https?://[\w.]+", html)) - {"http://www.w3.org"}  # SVG's name
    assert addresses == set()


def test_no_file_of_the_page_is_too_long():
    files = [path for path in page._FOLDER.iterdir() if path.is_file()]
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > 400} == {}


def test_what_would_end_its_own_element_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "index.html").write_text("<!-- a.js -->")
    (tmp_path / "a.js").write_text('"</script>"')
    monkeypatch.setattr(page, "_FOLDER", tmp_path)
    with pytest.raises(AssertionError, match=r"a\.js"):
        page_html()
