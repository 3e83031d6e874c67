"""Read text from the files of a folder."""

from collections.abc import Iterator
from pathlib import Path

from nanochat_core.config import ShardsConfig
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_files import choose_text, read_files
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
    paths = choose_text(
        sorted(files_below(folder)),
        str(folder),
        path_of=lambda path: path.name,
        size_of=lambda path: path.stat().st_size,
        log=progress.message,
    )
    yield from read_files(paths, config, progress)
    # A file may have been written while others were read.
    check_snapshot(folder, folder_snapshot(folder), config.snapshot)
