"""What a scan refuses, and that it takes everything else for code."""

import pytest

from flows.identity.fingerprint import Code
from flows.identity.syntax import scan
from nanochat_core.errors import ConfigError


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    'Text.'\n\nTEXT = f.__doc__\n",
        "'Text.'\nTEXT = __doc__\n",
        "class C:\n    'Text.'\n\nTEXT = getattr(C, '__doc__')\n",
        "TEXT = vars(int)['__doc__']\n",
        "from json import __doc__ as text\n",
        "from json import dumps, __doc__\n",
        "import inspect\nTEXT = inspect.getdoc(int)\n",
        "from inspect import getdoc as g\nTEXT = g(int)\n",
        "import pydoc\nTEXT = getattr(pydoc, 'getdoc')(int)\n",
        "match int:\n    case object(__doc__=text):\n        pass\n",
    ],
)
def test_code_that_reads_docstrings_is_refused(tmp_path, source):
    package = tmp_path / "tasks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "entry.py").write_text("from tasks import words\n")
    (package / "words.py").write_text(source)
    cache = tmp_path / "scans.json"
    for given in (None, cache, cache):  # scanned, and from the cache
        code = Code(tmp_path, cache=given)
        with pytest.raises(ConfigError, match=r"^tasks\.words reads __doc__") as caught:
            code.closure("tasks.entry")
        assert caught.value.hint
        code.save_cache()


@pytest.mark.parametrize("flag", ["from typing import TYPE_CHECKING as T", "T = False"])
def test_no_flag_hides_code(flag):
    sources = [f"{flag}\nif T:\n    import a.b\n    X = {n}\n" for n in (1, 2)]
    one, other = (scan(source.encode(), package="pkg") for source in sources)
    assert one.digest != other.digest
    assert "a.b" in one.imports
