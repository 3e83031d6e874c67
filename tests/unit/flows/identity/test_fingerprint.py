"""Identity: what changes it, what does not, and that it is the same everywhere."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from flows.identity.fingerprint import (
    CARRIERS,
    REPOSITORY,
    Code,
    canonical_json,
    identify,
    plugins_of,
)
from flows.identity.syntax import scan
from flows.stages import PRETRAIN, TASK_DATA
from nanochat_core import scaling
from nanochat_core.errors import ConfigError
from nanochat_core.job import write_json

RUN = scaling.run_for_depth(4)

# A repository small enough to know what each file should lead to.
MINI = {
    "nanochat_core/__init__.py": "",
    "nanochat_core/config.py": "LIMIT = 1\n",
    "nanochat_core/train/__init__.py": "",
    "nanochat_core/train/pretrain.py": (
        '"""Trains."""\n'
        "import numpy\n"
        "from nanochat_core.config import LIMIT\n"
        "from nanochat_core import optim\n"
        "def run(job):\n"
        '    """Runs."""\n'
        "    return optim.RATE  # learning\n"
    ),
    "nanochat_core/train/sft.py": (
        "def run(job):\n"
        "    from .loop import steps\n"
        "    import tasks.identity\n"
        "    return steps()\n"
    ),
    "nanochat_core/train/loop.py": "def steps():\n    return 3\n",
    "nanochat_core/optim.py": "RATE = 0.5\n",
    "nanochat_core/unused.py": "x = 1\n",
    "tasks/__init__.py": "",
    "tasks/identity.py": "FILE = 'identity.jsonl'\nOTHER = 'absent.jsonl'\n",
    "tasks/identity.jsonl": '{"a": 1}\n',
    "tasks/words.txt": "unnamed\n",
}
PRETRAIN_ENTRY, SFT_ENTRY = "nanochat_core.train.pretrain", "nanochat_core.train.sft"


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    for name, text in MINI.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def replace_text(root: Path, name: str, old: str, new: str) -> None:
    path = root / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_closure_is_what_the_entry_reaches(mini):
    assert list(Code(mini).closure(PRETRAIN_ENTRY)) == [
        "nanochat_core",
        "nanochat_core.optim",
        "nanochat_core.train",
        "nanochat_core.train.pretrain",
    ]
    assert list(Code(mini).closure(SFT_ENTRY)) == [
        "nanochat_core",
        "nanochat_core.train",
        "nanochat_core.train.loop",
        "nanochat_core.train.sft",
        "tasks",
        "tasks.identity",
        "tasks/identity.jsonl",
    ]


def test_a_data_file_that_appears_under_a_named_name_counts(mini):
    before = Code(mini).closure(SFT_ENTRY)
    (mini / "tasks" / "absent.jsonl").write_text("")
    assert Code(mini).closure(SFT_ENTRY).keys() - before.keys() == {"tasks/absent.jsonl"}


SYNTAX = '''
import os.path as p
from . import sibling
from ..above import thing as other
x: int = 0x10; y = 1_000.0; z = 2j; b = b"\\x00"; s = "a" "b" "\\u00e9\\ud800"; n = None; t = ...
f = f"a{x!r:>{y}}b" f"c{x=}" "d{}" f"{'q'}"
def g(a, /, b=1, *c, d=2, e, **k) -> "int": return [*c, *a], {**k, "a": -1}, {1, 2}, a[1:, ::2]
async def h():
    async with g() as q, g(): yield (await q)
    async for i in q: pass
class K(g, metaclass=h):
    """Doc."""
@g
class L: ...
lam = lambda v, *w: (u := v) if v else w
with open(p) as o, (x): del o
try: raise A from B
except (A, B) as e: pass
else: assert x, "m"
finally: global_ = 1
try: pass
except* E: pass
match x:
    case {"k": [1, *_], **r} if r: pass
    case K(1, a=2) | None | "s": pass
    case [] | {} | True: pass
    case _: pass
while not (a < b <= c) and d or e: break
else: continue_ = [i for i in x if i for j in i if j]; print(*(k for k in x), sep="")
if x: import taken
'''


def test_the_digest_of_a_module_is_pinned():
    """The same on Python 3.11, 3.12 and 3.13; when it must change, every artifact is rebuilt."""
    module = scan(SYNTAX.encode(), package="pkg.sub")
    assert module.digest == "588dbbd6c1e568063cc65cce17cce6dfa76ab7dfd6f3645288667dcba7e21f04"
    assert set(module.imports) == {
        "os.path",
        "pkg.sub.sibling",
        "pkg.above.thing",
        "taken",
    }


def test_canonical_json_keeps_ints_and_floats_apart_and_forgets_order():
    assert (
        canonical_json({"b": 1, "a": [True, None, "\u00e9"]})
        == b'{"a":[true,null,"\\u00e9"],"b":1}'
    )
    assert canonical_json({"a": 1}) != canonical_json({"a": 1.0})
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1,), {1: 2}, {1}, b"", Path("a")])
def test_a_value_without_a_stable_form_has_no_canonical_json(value):
    with pytest.raises((TypeError, ValueError)):
        canonical_json({"a": [value]})


def test_every_part_of_the_preimage_changes_the_fingerprint(mini):
    def identity(*, of_inputs: str = "0" * 64, **changes: Any) -> str:
        stage = dataclasses.replace(PRETRAIN, **{"entry": PRETRAIN_ENTRY} | changes)
        digests = {source.name: of_inputs for source in stage.inputs}
        return identify(stage, RUN, digests, code=Code(mini)).fingerprint

    prints = {
        identity(),
        identity(name="other"),
        identity(format=2),
        identity(config=("seed",)),
        identity(inputs=()),
        identity(of_inputs="1" * 64),
        identity(entry=SFT_ENTRY),
    }
    assert len(prints) == 7
    assert all(len(fingerprint) == 64 for fingerprint in prints)
    assert identity() == identity(makes="other words", compute="cpu")


# The repository itself.


def test_a_carrier_computes_nothing():
    """Whatever touches numbers decides. These move tensors, or read them for people, no more."""
    movers = {"train.loop.checkpoint", "train.loop.checkpointer"}
    readers = {"train.loop.metrics", "train.loop.run_environment"}
    apart = {f"nanochat_core.{name}" for name in movers | readers}
    assert apart <= CARRIERS
    for name in CARRIERS:
        source = (REPOSITORY / f"{name.replace('.', '/')}.py").read_bytes()
        imported = scan(source, package=name.rpartition(".")[0]).imports
        computes = {n.partition(".")[0] for n in imported} & {"torch", "numpy", "random"}
        assert name in apart or not computes, name


def test_no_module_becomes_a_carrier_by_accident():
    """Add one only if its values are hashed elsewhere or decide nothing, and pin the list again."""
    names = " ".join(sorted(CARRIERS))
    assert hashlib.sha256(names.encode()).hexdigest()[:16] == "6318aa3b91c2fd9f"


def test_the_carrier_that_writes_json_into_artifacts_has_pinned_bytes(tmp_path):
    """To change them, move the writer out of the carriers: it would decide bytes unseen."""
    write_json(tmp_path / "a.json", {"b": [1, 0.1], "a": {"text": "\u00e4"}, "empty": []})
    assert (tmp_path / "a.json").read_bytes() == (
        b'{\n "b": [\n  1,\n  0.1\n ],\n "a": {\n  "text": "\\u00e4"\n },\n "empty": []\n}\n'
    )


def test_the_cache_gives_the_same_answers_and_sees_every_edit(mini, tmp_path):
    cache = tmp_path / "cache" / "code.json"
    first = Code(mini, cache=cache)
    fresh = first.closure(SFT_ENTRY)
    first.save_cache()
    assert cache.is_file()
    assert Code(mini, cache=cache).closure(SFT_ENTRY) == fresh
    other = cache.read_text().replace('"digest": "', '"digest": "0')  # of another scanner
    cache.write_text(other.replace('"scanner": "', '"scanner": "0'))
    assert Code(mini, cache=cache).closure(SFT_ENTRY) == fresh
    replace_text(mini, "nanochat_core/train/loop.py", "3", "4")
    assert Code(mini, cache=cache).closure(SFT_ENTRY) == Code(mini).closure(SFT_ENTRY) != fresh


def test_the_same_source_in_two_packages_reaches_the_modules_of_each(mini):
    for package in ("one", "two"):
        folder = mini / "nanochat_core" / package
        folder.mkdir()
        for name, text in (("__init__", ""), ("entry", "from . import part\n"), ("part", "")):
            (folder / f"{name}.py").write_text(text)
    found = Code(mini).closure("nanochat_core.one.entry", "nanochat_core.two.entry")
    assert {"nanochat_core.one.part", "nanochat_core.two.part"} <= found.keys()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"scanner": 1, "modules": 2}'])
def test_a_damaged_cache_is_no_cache(mini, tmp_path, text):
    cache = tmp_path / "code.json"
    cache.write_text(text)
    assert Code(mini, cache=cache).closure(SFT_ENTRY) == Code(mini).closure(SFT_ENTRY)


def test_a_task_of_another_package_counts_with_what_it_imports_from_there(mini, monkeypatch):
    for name, text in {
        "riddles/__init__.py": "",
        "riddles/task.py": "from riddles import words\nimport elsewhere, tasks.identity\n",
        "riddles/words.py": "FILE = 'words.txt'\n",
        "riddles/words.txt": "one\n",
        "riddles/unused.py": "",
        "elsewhere.py": "import riddles.unused\n",
    }.items():
        path = mini / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(mini / "site")
    found = Code(mini).closure(PRETRAIN_ENTRY, "riddles.task").keys()
    assert found - Code(mini).closure(PRETRAIN_ENTRY, "tasks.identity").keys() == {
        *("riddles", "riddles.task", "riddles.words", "riddles/words.txt")
    }
    assert "tasks.identity" in found
    (mini / "site" / "riddles" / "__init__.py").unlink()  # several packages may share the name
    assert {"riddles.task", "riddles/words.txt"} <= Code(mini).closure(
        SFT_ENTRY, "riddles.task"
    ).keys()
    with pytest.raises(ConfigError, match=r"no source file of the module riddles\.absent"):
        Code(mini).closure(SFT_ENTRY, "riddles.absent")
    assert plugins_of(TASK_DATA, RUN) == ()
