"""Read text from the files of any dataset on the Hugging Face Hub."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.client import download, list_files
from nanochat_core.data.hub.datasets import split_path
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_files import choose_text, first_kind, kind_of_file, read_files
from nanochat_core.runtime.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub import RepoFile


def documents(config: ShardsConfig, progress: Progress, scratch: Path) -> Iterator[Document]:
    """Download the files that `config.path` names at its revision; yield every document.

    Without a pattern only the first of KINDS that the dataset has is read: the others are most
    often the same text again. The files are read in order of their path. Raises ConfigError if the
    path names no dataset, DataError naming what cannot be downloaded or read. The files lie in the
    cache of the Hub's client, nothing in `scratch`.
    """
    repository, pattern = split_path(config.path)
    commit, files = list_files(repository, config.revision or "main", ["*"])
    wanted = _choose(files, pattern, config.path or "", progress.message)
    size = sum(file.size for file in wanted)
    progress.message(
        f"{repository} at commit {commit[:12]}: {len(wanted)} files, {size / 1e6:,.0f} MB"
    )

    paths = download(repository, commit, wanted, log=progress.message)
    yield from read_files(paths, config, progress)


def _choose(
    files: "Sequence[RepoFile]", pattern: str, where: str, log: Callable[[str], None]
) -> "list[RepoFile]":
    """Return the text among the files that match the pattern or are in the folder of this name."""
    if pattern:
        patterns = (pattern, f"{pattern}/*")
        files = [file for file in files if any(fnmatchcase(file.path, p) for p in patterns)]
    texts = choose_text(
        files,
        where,
        path_of=lambda file: file.path,
        size_of=lambda file: file.size,
        log=log,
        named=pattern,
        pattern_of="shards.path",
    )
    first = first_kind(file.path for file in texts)
    chosen = [file for file in texts if pattern or kind_of_file(file.path) == first]
    if len(chosen) < len(texts):
        log(
            f"{len(texts) - len(chosen):,} files of other kinds than {first} are left out, as most "
            f"often the same text: {where}/* has all files"
        )
    return chosen
