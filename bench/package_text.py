"""A text of ten million characters that needs no network: docstrings of installed packages."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from nanochat_core.data.text.docstrings import make_documents, read_sections

CHARACTERS = 10_000_000
SKIPPED = {"test", "tests", "testing", "_vendor", "vendor", "_dynamo", "_inductor"}


def package_text(directory: Path) -> tuple[str, ...]:
    """Write docstrings of the packages beside torch; return the settings that choose this text."""
    directory.mkdir(parents=True)
    size = 0
    with (directory / "docstrings.jsonl").open("w", encoding="utf-8") as file:
        for text in _documents(Path(torch.__file__).parents[1]):
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text)
            if size > CHARACTERS:
                break
    return ("shards.source=local", f"shards.path={directory}")


def _documents(site: Path) -> Iterator[str]:
    seen: set[str] = set()
    for path in sorted(site.rglob("*.py")):
        name = path.relative_to(site)
        if not SKIPPED & set(name.parts):
            source = path.read_text(encoding="utf-8", errors="replace")
            yield from make_documents(read_sections(source, str(name)), seen=seen)
