import sys

import pytest

from nanochat_core.config import ShardsConfig
from nanochat_core.data.text import pydocs
from nanochat_core.data.text.docstrings import MAX_CHARS, make_documents, read_sections, split_text
from nanochat_core.runtime.progress import Progress
from tests.support.nanochat_core.data.fixtures import refused

VERSION = "python=={}.{}.{}".format(*sys.version_info)
SOURCE = '''
"""Greet people, politely and in several languages, without ever forgetting a name."""
import nowhere_at_all

raise SystemExit("this module must not be imported")

if True:
    async def greet(
        name: str,  # who
        *,
        loud=False,
    ) -> str:
        """Return a greeting for `name`.


        Loud greetings end in an exclamation mark."""

def short():
    """Short."""

class Small(Base):
    """A class with little to say, which stays with its module."""

    def method(self):
        """Do the one thing that it does, and return nothing at all."""

class Large(Base, key=1):
    """LARGE"""
'''.replace("LARGE", "Everything about large things, at length. " * 50)


def documents(tmp_path, *snapshot):
    config = ShardsConfig(
        source="pydocs", path=None, num_shards=1, snapshot=snapshot, revision=None
    )
    progress = Progress(tmp_path / "events.jsonl", active=False)
    return list(pydocs.documents(config, progress, tmp_path))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder that is taken for the standard library: one module, and what is skipped."""
    root = tmp_path / "lib"
    for path in ("demo/__init__.py", "demo/tests/test_it.py", "site-packages/other.py"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(SOURCE.replace("people", f"people, as {path} says"))
    monkeypatch.setattr(pydocs.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def test_a_module_is_one_document_and_a_large_class_another():
    first, second = make_documents(read_sections(SOURCE, "demo"), seen=set())
    assert first == (
        "demo\n\n"
        "Greet people, politely and in several languages, without ever forgetting a name.\n\n"
        "async def greet(name: str, *, loud=False) -> str:\n\n"
        "Return a greeting for `name`.\n\n"
        "Loud greetings end in an exclamation mark.\n\n"
        "class Small(Base):\n\n"
        "A class with little to say, which stays with its module.\n\n"
        "def method(self):\n\n"
        "Do the one thing that it does, and return nothing at all."
    )
    assert second.startswith("demo: class Large(Base, key=1):\n\nEverything about large things")


def test_a_docstring_counts_once():
    seen = set()
    assert len(make_documents(read_sections(SOURCE, "demo"), seen=seen)) == 2
    assert make_documents(read_sections(SOURCE, "copy"), seen=seen) == []


@pytest.mark.parametrize("source", ["def broken(:\n" + '"""' + "text " * 50 + '"""', "x = 1\n", ""])
def test_a_source_without_documentation_says_nothing(source):
    assert read_sections(source, "demo") == []


def test_long_text_is_cut_between_paragraphs_and_none_is_lost():
    paragraphs = [f"{i} " + "word " * (200 * i) for i in range(1, 30)]
    parts = split_text(paragraphs, title="title")
    assert "\n\n".join(part.removeprefix("title\n\n") for part in parts) == "\n\n".join(paragraphs)
    assert max(map(len, parts)) <= MAX_CHARS + max(map(len, paragraphs))
    lines = "\n".join(f"line {i} of a paragraph without end" for i in range(2000))
    parts = split_text([lines], title="title")
    assert len(parts) > 3
    assert max(map(len, parts)) <= MAX_CHARS + 100


def test_modules_are_read_without_importing_them(tmp_path, library):
    found = documents(tmp_path, *pydocs.python_snapshot())
    modules = [d for d in found if not d.group.startswith("help ")]
    assert [d.group for d in modules] == ["demo", "demo"]
    assert "people, as demo/__init__.py says" in modules[0].text
    assert "demo" not in sys.modules
    assert len(found) > 10
    assert all(200 <= len(d.text) <= 2 * MAX_CHARS for d in found)
    assert len({d.text for d in found}) == len(found)


def test_modules_are_read_in_the_order_of_their_names(tmp_path, library):
    for i in reversed(range(100)):
        text = SOURCE.replace("people", f"person {i}").replace("large things", f"things {i}")
        (library / "demo" / f"m{i:03}.py").write_text(text)
    found = documents(tmp_path, *pydocs.python_snapshot())
    # Of each its class: the rest is too short without what demo itself says too.
    groups = [d.group for d in found if d.text.startswith("demo.m")]
    assert groups == [f"demo.m{i:03}" for i in range(100)]


def test_the_help_topics_are_documents():
    topics = {d.group: d.text for d in pydocs._help_topics()}
    assert topics["help lambda"].startswith("help('lambda')\n\nLambdas\n*******\n\n")


@pytest.mark.parametrize("snapshot", [(), ("python==2.7.18",), (VERSION, "numpy==1.0")])
def test_another_snapshot_is_refused(tmp_path, snapshot):
    hint = "plan again with this Python, or use that version"
    refused(f", this is {VERSION}", documents, tmp_path, *snapshot, hint=hint)
