"""Choose the text among files of any names, and read documents from it.

What a folder, a bucket and a dataset on the Hub have in common: the same endings are text, in
capital letters or compressed too, and the same files are left out, with a line in the stage's log.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from nanochat_core.config import ShardsConfig
from nanochat_core.data.shard_files import TEXT, read_batches
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_folder import is_hidden, unreadable
from nanochat_core.errors import DataError
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress
from tasks.base import kind_of
from tasks.user_files import COMPRESSED, FileFault, check_lfs, json_lines, text_chunks

MAX_IN_TXT = 100_000_000  # characters of a document
MAX_ENDINGS = 4  # that are named of the files that are left out
MAX_DESCRIPTION = 1_000_000  # bytes of a .json that describes data
MAX_DESCRIPTIONS = 10_000_000  # bytes of all files that describe data
DIVIDE = r"--set 'shards.separator=\n\n'"

_File = TypeVar("_File")


def kind_of_file(path: str) -> str | None:
    """Return the kind of text that a file of this name holds, one of KINDS; None if none."""
    name = PurePosixPath(path.lower())
    if name.suffix in COMPRESSED:
        inner = PurePosixPath(name.stem).suffix
        return inner if inner in KINDS and inner != PARQUET else None
    return name.suffix if name.suffix in KINDS else None


def choose_text(
    files: Iterable[_File],
    where: str,
    *,
    path_of: Callable[[_File], str],
    size_of: Callable[[_File], int],
    log: Callable[[str], None],
    named: str = "",
    pattern_of: str = "",
) -> list[_File]:
    """Return the files that are text, in the given order; log how many are not, by their endings.

    Hidden files and what macOS adds to folders and archives do not count, but `named` is read (see
    `is_hidden`). `pattern_of`: the setting of a source that takes patterns, for the hint. Raises
    DataError if no file is text, or if the others have more bytes; a few MB of descriptions do not
    count there.
    """
    files = [file for file in files if not is_hidden(path_of(file), named=named)]
    chosen = [file for file in files if kind_of_file(path_of(file))]
    others = [file for file in files if not kind_of_file(path_of(file))]
    counts = f"{len(others):,} of {len(files):,} files are not text"
    left_out = f"{counts}: {_endings(map(path_of, others))}"
    if not chosen:
        reason = f"; {left_out}" if others else ""
        raise DataError(f"{where} has no file to read{reason}", hint=HINT)
    about = sum(size_of(f) for f in others if _is_about(path_of(f), size_of(f)))
    data = sum(map(size_of, others)) - min(about, MAX_DESCRIPTIONS)
    if data > sum(map(size_of, chosen)):
        hint = f"name the text alone by a pattern in {pattern_of}; or else: {HINT}"
        hint = hint if pattern_of else HINT
        raise DataError(f"most bytes of {where} would be left out; {left_out}", hint=hint)
    if others:
        log(f"left out of {where}: {left_out}")
    return chosen


def first_kind(names: Iterable[str]) -> str:
    """Return the first of KINDS that one of these text files has."""
    return min((kind_of_file(name) or "" for name in names), key=KINDS.index)


def _is_about(path: str, size: int) -> bool:
    """Return whether a file describes data, by its name, or by its size if it is a .json."""
    name = PurePosixPath(path.lower())
    is_small = name.suffix == ".json" and size <= MAX_DESCRIPTION
    return is_small or name.name.startswith(("readme", "license"))


def _endings(paths: Iterable[str]) -> str:
    """Return the most frequent endings of files with their numbers, in words."""
    counts = Counter("".join(PurePosixPath(path).suffixes[-1:]).lower() for path in paths)
    most = counts.most_common(MAX_ENDINGS)
    words = [f"{count:,} {ending or 'without an ending'}" for ending, count in most]
    return ", ".join([*words, *(["others"] if len(counts) > len(most) else [])])


def documents_of(path: Path, config: ShardsConfig) -> Iterator[Document]:
    """Yield the documents of a file.

    Equal documents form one group, so that no two of them are in different splits. Raises DataError
    naming the file, and the line or row, if it cannot be used.
    """
    kind = kind_of_file(path.name)
    assert kind is not None, f"{path} is not text"
    try:
        check_lfs(path)
        for text in _READERS[kind](path, config):
            # Parquet cannot store lone surrogates, which an escape in JSON can be.
            valid = text.encode("utf-8", "replace").decode()
            yield Document(text=valid, group=valid)
    except FileFault as error:
        raise DataError(str(error), hint=error.hint) from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_files(
    paths: Sequence[Path], config: ShardsConfig, progress: Progress
) -> Iterator[Document]:
    """Yield the documents of several files, in order; `progress` counts files."""
    progress.start(len(paths), unit="file")
    for i, path in enumerate(paths, start=1):
        yield from documents_of(path, config)
        progress.step(i)


def _read_parquet(path: Path, config: ShardsConfig) -> Iterator[str]:
    for texts in read_batches(path, column=config.column or TEXT):
        yield from texts


def _read_jsonl(path: Path, config: ShardsConfig) -> Iterator[str]:
    column = config.column or TEXT
    hint = f'each line is an object like {{"{column}": "..."}}'
    for where, value in json_lines(path, hint=hint):
        if not isinstance(value, dict):
            raise DataError(f"{where} is {kind_of(value)}, not an object", hint=hint)
        if column not in value:
            raise DataError(
                f"{where} has no {column}, its keys are: {', '.join(value)}",
                hint=f"{hint}; --set shards.column=NAME for another name",
            )
        if not isinstance(text := value[column], str):
            raise DataError(
                f"{where} has a {column} that is {kind_of(text)}",
                hint="a text is a string; leave the line out if it has none",
            )
        yield text


def _read_txt(path: Path, config: ShardsConfig) -> Iterator[str]:
    """Yield the documents of a .txt: what is between separators, without one all of it."""
    text = ""
    for chunk in text_chunks(path):
        HEARTBEAT.beat("reading documents")
        text += chunk.replace("\ufeff", "")  # joined files have their marks in the middle
        if config.separator:
            *documents, text = text.split(config.separator)
            yield from documents
        if len(text) > MAX_IN_TXT:
            size = f"{MAX_IN_TXT / 1e6:,.0f} MB"
            if config.separator:
                raise DataError(
                    f"{path} has a document of more than {size} between separators",
                    hint="choose a shards.separator that divides it, or divide the file",
                )
            raise DataError(
                f"{path} has more than {size}, and a .txt is one document",
                hint="divide it at blank lines, for example: " + DIVIDE,
            )
    yield text


PARQUET = ".parquet"
_READERS: dict[str, Callable[[Path, ShardsConfig], Iterator[str]]] = {
    PARQUET: _read_parquet,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".txt": _read_txt,
}
KINDS = tuple(_READERS)
HINT = (
    f"text is {', '.join(KINDS)}, all but {PARQUET} also as {', '.join(COMPRESSED)}: convert other "
    "files, or move them elsewhere"
)
