"""Read text from any dataset on the Hugging Face Hub: its .parquet, .jsonl and .txt files."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.client import HubFile, download, list_files
from nanochat_core.data.hub.datasets import split_path
from nanochat_core.data.hub.transfers import OnBytes, fetch_files
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_files import KINDS, documents_of
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import Progress


def documents(config: ShardsConfig, progress: Progress, scratch: Path) -> Iterator[Document]:
    """Download the files that `config.path` names at its revision; yield every document.

    Without a pattern only the first of KINDS that the dataset has is read: the others are most
    often the same text again. The files are read in order of their path. Raises ConfigError if the
    path names no dataset, DataError naming what cannot be downloaded or read. The files lie in the
    cache of the Hub's client, nothing in `scratch`.
    """
    repository, pattern = split_path(config.path)
    commit, files = list_files(repository, config.revision or "main", ["*"])
    wanted = _choose(files, pattern)
    if not wanted:
        like = f" like {pattern}" if pattern else ""
        raise DataError(
            f"{repository} has no file{like} to read at commit {commit[:12]}",
            hint=f"one of these kinds: {', '.join(KINDS)}",
        )
    size = sum(file.size for file in wanted)
    progress.message(
        f"{repository} at commit {commit[:12]}: {len(wanted)} files, {size / 1e6:,.0f} MB"
    )

    def fetch(number: int, on_bytes: OnBytes) -> Path:
        return download(repository, commit, wanted[number], on_bytes=on_bytes)

    for path in fetch_files(fetch, [file.size for file in wanted], progress):
        yield from documents_of(path, column=config.column)


def _choose(files: Sequence[HubFile], pattern: str) -> list[HubFile]:
    """Return the files that match the pattern or are in the folder of this name."""
    if pattern:
        patterns = (pattern, f"{pattern}/*")
        found = [file for file in files if any(fnmatchcase(file.path, p) for p in patterns)]
        return [file for file in found if PurePath(file.path).suffix in KINDS]
    by_kind = ([file for file in files if PurePath(file.path).suffix == kind] for kind in KINDS)
    return next(filter(None, by_kind), [])
