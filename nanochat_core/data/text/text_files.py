"""Read documents from .parquet, .jsonl and .txt files."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat_core.data.shard_files import TEXT, read_row_groups
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_folder import unreadable
from nanochat_core.errors import DataError

MOST_IN_TXT = 100_000_000  # bytes


def documents_of(path: Path, *, column: str | None) -> Iterator[Document]:
    """Yield the documents of a file; `column` is that of the text, None means "text".

    Equal documents form one group, so that no two of them are in different splits. Raises DataError
    naming the file, and the line or row, if it cannot be used.
    """
    for text in _READERS[path.suffix](path, column or TEXT):
        yield Document(text=text, group=text)


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    for texts in read_row_groups(path, column=column):
        yield from texts


def _read_jsonl(path: Path, column: str) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                text = json.loads(line.decode("utf-8"))[column]
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{where} is not UTF-8: {error.reason}", hint="convert it: iconv -t utf-8"
                ) from error
            except (ValueError, RecursionError) as error:  # nested too deep
                raise DataError(
                    f"{where} is not JSON: {error}", hint="each line is one object, none is empty"
                ) from error
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{where} has no {column}",
                    hint=f'each line is an object like {{"{column}": "..."}}; '
                    "--set shards.column=NAME for another name",
                ) from error
            if not isinstance(text, str):
                raise DataError(
                    f"{where} has a {column} that is a {type(text).__name__}",
                    hint="a text is a string; leave the line out if it has none",
                )
            # Parquet cannot store lone surrogates.
            yield text.encode("utf-8", "replace").decode()  # an escape can be a lone surrogate


def _read_txt(path: Path, _: str) -> Iterator[str]:
    with _opened(path) as file:
        content = file.read(MOST_IN_TXT + 1)
    if len(content) > MOST_IN_TXT:
        raise DataError(
            f"{path} has more than {MOST_IN_TXT / 1e6:,.0f} MB, and a .txt is one document",
            hint='write its documents as lines of .jsonl, each like {"text": "..."}',
        )
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


_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".txt": _read_txt,
}

KINDS = tuple(_READERS)
