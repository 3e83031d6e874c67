"""Read text from a folder of .parquet, .jsonl and .txt files."""

from collections.abc import Iterator
from pathlib import Path

from nanochat_core.config import ShardsConfig
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_files import KINDS, documents_of
from nanochat_core.data.text.text_folder import check_snapshot, files_below, folder_snapshot
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import Progress


def documents(config: ShardsConfig, progress: Progress, scratch: Path) -> Iterator[Document]:
    """Yield every document under `config.path`, files in order of their path.

    Equal documents form one group. Raises DataError naming the file (and line) that cannot be used,
    or the folder if it has no file of a known kind or does not match `config.snapshot`, at the
    start or at the end.
    """
    if config.path is None:
        raise DataError("the text source local needs a folder", hint="--set shards.path=FOLDER")
    folder = Path(config.path)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", hint="shards.path names a folder of text")
    check_snapshot(folder, folder_snapshot(folder), config.snapshot)
    paths = sorted(path for path in files_below(folder) if path.suffix in KINDS)
    if not paths:
        raise DataError(
            f"{folder} has no file to read", hint=f"one of these kinds: {', '.join(KINDS)}"
        )
    progress.start(len(paths), unit="file")
    for i, path in enumerate(paths, start=1):
        yield from documents_of(path, column=config.column)
        progress.step(i)
    # A file may have been written while others were read.
    check_snapshot(folder, folder_snapshot(folder), config.snapshot)
