"""A text that needs no network: docstrings of installed packages, and their sources if wanted."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from nanochat_core.data.text.docstrings import make_documents, read_sections

DOCS = Path(__file__).resolve().parents[1] / "docs"
CHARACTERS = 10_000_000
SOURCE_CHARACTERS = 100_000  # of a file: a larger one is a table, or was generated
SKIPPED = {"test", "tests", "testing", "_vendor", "vendor", "_dynamo", "_inductor"}


def package_text(
    directory: Path, *, characters: int = CHARACTERS, sources: bool = False
) -> tuple[str, ...]:
    """Write docstrings of the packages beside torch, until there are so many characters, with
    `sources` also their files; return the settings that choose this text."""
    directory.mkdir(parents=True)
    size = 0
    with (directory / "docstrings.jsonl").open("w", encoding="utf-8") as file:
        for text in _documents(Path(torch.__file__).parents[1], sources=sources):
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > characters:
                break
    return ("shards.source=local", f"shards.path={directory}")


def small_text(directory: Path) -> tuple[str, ...]:
    """Write our documentation as a text; return the settings that choose it, and little of it."""
    directory.mkdir()
    for path in DOCS.rglob("*.md"):
        (directory / f"{path.stem}.txt").write_text(path.read_text())
    return (
        *("shards.source=local", f"shards.path={directory}", "shards.num_shards=2"),
        "tokenizer.max_chars=200000",
    )


def _documents(site: Path, *, sources: bool) -> Iterator[str]:
    seen: set[str] = set()
    for path in sorted(site.rglob("*.py")):
        name = path.relative_to(site)
        if not SKIPPED & set(name.parts):
            source = path.read_text(encoding="utf-8", errors="replace")
            yield from make_documents(read_sections(source, str(name)), seen=seen)
            if sources and len(source) <= SOURCE_CHARACTERS:
                yield source
