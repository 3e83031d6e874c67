"""Read text from a folder of .parquet (column `text`), .jsonl ({"text": ...}) and .txt files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat_core.config import ShardsConfig
from nanochat_core.data.shard_files import read_row_groups
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_folder import files_below, folder_snapshot, unreadable
from nanochat_core.errors import DataError
from nanochat_core.runtime.progress import Progress


def documents(config: ShardsConfig, progress: Progress) -> Iterator[Document]:
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
    _check_snapshot(folder, config.snapshot)
    paths = sorted(path for path in files_below(folder) if path.suffix in _READERS)
    if not paths:
        raise DataError(
            f"{folder} has no file to read", hint=f"one of these kinds: {', '.join(_READERS)}"
        )
    progress.start(len(paths), unit="file")
    # The text is its own group, so that equal documents are never in both splits.
    for i, path in enumerate(paths, start=1):
        for text in _READERS[path.suffix](path):
            yield Document(text=text, group=text)
        progress.step(i)
    _check_snapshot(folder, config.snapshot)  # a file may have been written while others were read


def _check_snapshot(folder: Path, planned: tuple[str, ...]) -> None:
    """Raise DataError if the folder has changed since the run was planned."""
    found = folder_snapshot(folder)
    if found != planned:
        raise DataError(
            f"{folder} has changed since the run was planned: it holds {', '.join(found)}, "
            f"the plan has {', '.join(planned) or 'no snapshot'}",
            hint="run again: a new plan uses the current text",
        )


def _read_parquet(path: Path) -> Iterator[str]:
    for texts in read_row_groups(path):
        yield from texts


def _read_jsonl(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = json.loads(line.decode("utf-8"))["text"]
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} is not UTF-8: {error.reason}", hint="convert it: iconv -t utf-8"
                ) from error
            except ValueError as error:
                raise DataError(
                    f"{where} is not JSON: {error}", hint="each line is one object, none is empty"
                ) from error
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{where} has no text", hint='each line is an object like {"text": "..."}'
                ) from error
            if not isinstance(text, str):
                raise DataError(
                    f"{where} has a text that is a {type(text).__name__}",
                    hint="a text is a string; leave the line out if it has none",
                )
            # Parquet cannot store lone surrogates.
            yield text.encode("utf-8", "replace").decode()  # an escape can be a lone surrogate


def _read_txt(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        content = file.read()
    try:
        yield content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line} is not UTF-8: {error.reason}", hint="convert it: iconv -t utf-8"
        ) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".txt": _read_txt,
}
