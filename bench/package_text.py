"""A text that needs no network: docstrings of installed packages, and their sources if wanted."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from nanochat_core.data.text.docstrings import make_documents, read_sections

DOCS = Path(__file__).resolve().parents[1] / "docs"
CHARACTERS = 10_000_000
SOURCE_CHARACTERS = 100_000  # of a file: a larger one is a table, or was generated
SKIPPED = {"test", "tests", "testing", "_vendor", "vendor", "_dynamo", "_inductor"}


def package_text(directory: Path, *, sources: int = 0) -> tuple[str, ...]:
    """Write docstrings of the packages beside torch, and so many characters of their sources;
    return the settings that choose this text."""
    directory.mkdir(parents=True)
    site = Path(torch.__file__).parents[1]
    _write(directory / "docstrings.jsonl", _documents(site), CHARACTERS)
    if sources:
        _write(directory / "sources.jsonl", _sources(site), sources)
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


def _write(path: Path, texts: Iterable[str], characters: int) -> None:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > characters:
                break


def _sources(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) <= SOURCE_CHARACTERS:
            yield text


def _documents(site: Path) -> Iterator[str]:
    seen: set[str] = set()
    for path in sorted(site.rglob("*.py")):
        name = path.relative_to(site)
        if not SKIPPED & set(name.parts):
            source = path.read_text(encoding="utf-8", errors="replace")
            yield from make_documents(read_sections(source, str(name)), seen=seen)
