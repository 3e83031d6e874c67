"""What a scan takes for no code, and what it refuses."""

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


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = 1\n", False),
        ("from typing import TYPE_CHECKING as T\nif T:\n    X = 1\n", False),
        ("import typing\nif typing.TYPE_CHECKING:\n    X = 1\n", False),
        ("import typing as t\nif t.TYPE_CHECKING:\n    X = 1\n", False),
        ("import settings as x\nif x.TYPE_CHECKING:\n    X = 1\n", True),
        ("from settings import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = 1\n", True),
        ("TYPE_CHECKING = True\nif TYPE_CHECKING:\n    X = 1\n", True),
        ("import typing\ntyping.TYPE_CHECKING = True\nif typing.TYPE_CHECKING:\n    X = 1\n", True),
        ("import typing\ntyping = object()\nif typing.TYPE_CHECKING:\n    X = 1\n", True),
        ("if not TYPE_CHECKING:\n    X = 1\n", True),
        ("def f(x):\n    if x.TYPE_CHECKING:\n        X = 1\n", True),
        (
            "import json\nfrom typing import Any, TYPE_CHECKING\nif TYPE_CHECKING:\n    X = 1\n",
            False,
        ),
        (
            "def f():\n from typing import TYPE_CHECKING\n if TYPE_CHECKING:\n  X = 1\n",
            False,
        ),
        ("if TYPE_CHECKING:\n    X = 1\n", True),
        ("from .typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = 1\n", True),
        ("from . import typing\nif typing.TYPE_CHECKING:\n    X = 1\n", True),
        ("import settings as typing\nif typing.TYPE_CHECKING:\n    X = 1\n", True),
    ],
)
def test_only_typings_flag_hides_code(source, runs):
    changed = source.replace("X = 1", "X = 2")
    digests = {scan(text.encode(), package="pkg").digest for text in (source, changed)}
    assert (len(digests) == 2) == runs


@pytest.mark.parametrize(
    "binding",
    [
        "def f(TYPE_CHECKING=True): ...",
        "f = lambda *TYPE_CHECKING: 0",
        "def TYPE_CHECKING(): ...",
        "class TYPE_CHECKING: ...",
        "from consts import *",
        "try: ...\nexcept E as TYPE_CHECKING: ...",
        "import consts.flags as TYPE_CHECKING",
        "import TYPE_CHECKING.flags",
        "import typing as TYPE_CHECKING",
        "globals()['TYPE_CHECKING'] = True",
        "globals()['TYPE_' + 'CHECKING'] = True",
        "vars().update(TYPE_CHECKING=True)",
        "exec('TYPE_' + 'CHECKING = 1')",
        "import sys\nsetattr(sys.modules[__name__], 'TYPE_CHECKING', True)",
        "for TYPE_CHECKING in (1, 2): ...",
        "with open(p) as TYPE_CHECKING: ...",
        "match p:\n    case [*TYPE_CHECKING]: ...",
        "match p:\n    case {**TYPE_CHECKING}: ...",
        "match p:\n    case int() as TYPE_CHECKING: ...",
        "x = (TYPE_CHECKING := True)",
        "import typing as t\nt.TYPE_CHECKING = True",
        "del TYPE_CHECKING",
    ],
)
def test_another_binding_of_typings_flag_hides_no_code(binding):
    for begin in ("", "from typing import TYPE_CHECKING\n"):
        sources = [f"{begin}{binding}\nif TYPE_CHECKING:\n    X = {n}\n" for n in (1, 2)]
        assert len({scan(source.encode(), package="pkg").digest for source in sources}) == 2
