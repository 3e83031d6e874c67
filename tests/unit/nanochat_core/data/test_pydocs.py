import sys

import pytest

from nanochat_core.config import ShardsConfig
from nanochat_core.data.text import pydocs
from nanochat_core.data.text.docstrings import MAX_CHARS, make_documents, read_sections, split_text
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import Progress

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

add_docstr(torch.greet, r"""
greet(name) -> str

Greets as fast as the hardware allows. Args: {name}
""".format(**common))
'''.replace("LARGE", "Everything about large things, at length. " * 50)


def config(*snapshot):
    return ShardsConfig(source="pydocs", path=None, num_shards=1, snapshot=snapshot, revision=None)


def documents(tmp_path, *snapshot):
    return list(
        pydocs.documents(
            config(*snapshot), Progress(tmp_path / "events.jsonl", active=False), tmp_path
        )
    )


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """An installed package "demo-text" 1.0 with one module."""
    site = tmp_path / "site"
    info = site / "demo_text-1.0+cpu.dist-info"
    info.mkdir(parents=True)
    (site / "demo" / "tests").mkdir(parents=True)
    (site / "demo" / "__init__.py").write_text(SOURCE)
    (site / "demo" / "tests" / "test_it.py").write_text('"""' + "A test module. " * 40 + '"""')
    about = "Demo greets people. " * 20
    (info / "METADATA").write_text(f"Name: demo-text\n\n# Demo\n\n[![badge](x)](y)\n\n{about}\n")
    (info / "RECORD").write_text(
        "demo/__init__.py,,\ndemo/tests/test_it.py,,\n../../bin/demo.py,,\ndemo/data.bin,,\n"
    )
    monkeypatch.syspath_prepend(site)
    return site


def test_a_module_is_one_document_and_a_large_class_another():
    first, second = make_documents(read_sections(SOURCE, "demo"), seen=set())
    assert first == (
        "demo\n\n"
        "Greet people, politely and in several languages, without ever forgetting a name.\n\n"
        "async def greet(name: str, *, loud=False) -> str:\n\n"
        "Return a greeting for `name`.\n\n"
        "Loud greetings end in an exclamation mark.\n\n"
        "torch.greet\n\n"
        "greet(name) -> str\n\n"
        "Greets as fast as the hardware allows. Args: {name}\n\n"
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


def test_a_package_is_read_without_importing_it(tmp_path, demo):
    found = documents(tmp_path, "demo-text==1.0")
    assert {d.group for d in found} == {"demo", "description demo-text"}
    assert found[-1].text.startswith("demo-text\n\n# Demo\n\nDemo greets people.")
    assert "demo" not in sys.modules


def test_the_same_snapshot_gives_the_same_documents(tmp_path):
    snapshot = [e for e in pydocs.installed_snapshot() if e.startswith(("filelock", "sortedcon"))]
    assert len(snapshot) == 2
    found = documents(tmp_path, *snapshot)
    assert found == documents(tmp_path, *snapshot)
    assert len(found) > 10
    assert all(200 <= len(d.text) <= 2 * MAX_CHARS for d in found)
    assert len({d.text for d in found}) == len(found)


def test_reading_in_processes_gives_the_same_documents(tmp_path, demo):
    whole = documents(tmp_path, "demo-text==1.0")
    modules = 100
    for i in range(modules):
        text = SOURCE.replace("people", f"person {i}").replace("large things", f"things {i}")
        (demo / "demo" / f"m{i:03}.py").write_text(text)
    record = "".join(f"demo/m{i:03}.py,,\n" for i in reversed(range(modules)))
    (demo / "demo_text-1.0+cpu.dist-info" / "RECORD").write_text(record)
    found = documents(tmp_path, "demo-text==1.0")
    groups = [d.group for d in found if d.text.startswith("demo.m")]
    # What the modules share is in the first one only.
    assert groups == ["demo.m000", *(f"demo.m{i:03}" for i in range(modules))]
    assert found[-1] == whole[-1]


def test_the_help_topics_are_documents():
    topics = {d.group: d.text for d in pydocs._help_topics()}
    assert topics["help lambda"].startswith("help('lambda')\n\nLambdas\n*******\n\n")


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("demo-text==2.0", "needs demo-text==2.0, installed is 1.0"),
        ("no-such-package==1.0", "needs no-such-package==1.0, which is not installed"),
        ("python==2.7.18", r"needs python==2.7.18, installed is \d"),
    ],
)
def test_another_installation_is_refused(tmp_path, demo, entry, complaint):
    with pytest.raises(DataError, match=complaint) as error:
        documents(tmp_path, entry)
    assert error.value.hint


def test_an_installation_that_lists_no_files_is_refused(tmp_path, demo):
    (demo / "demo_text-1.0+cpu.dist-info" / "RECORD").unlink()
    with pytest.raises(DataError, match="installation of demo-text has no list"):
        documents(tmp_path, "demo-text==1.0")


def test_the_installed_snapshot_names_python_first_and_what_is_big():
    snapshot = pydocs.installed_snapshot()
    assert snapshot[0] == "python=={}.{}.{}".format(*sys.version_info)
    assert any(entry.startswith("numpy==") for entry in snapshot)
    assert not any("+" in entry for entry in snapshot)
