"""The shard format: parquet files with one column `text`, and `shards.json` next to them.

Row groups hold 1024 documents, the unit that a reader loads into memory. No document is blank. The
last shard is for validation.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat_core.data.array_files import read_index
from nanochat_core.errors import DataError, first_line
from nanochat_core.job import move_into_place, write_json
from nanochat_core.runtime.heartbeat import HEARTBEAT

FORMAT = 1
INDEX_FILE = "shards.json"
ROW_GROUP_DOCUMENTS = 1024
_HINT = "it is damaged: get it again from where it came, or make the shards again"
_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)  # the last: a name of a column
_LARGE = pa.large_string()
_SHARD_TYPES = (pa.string(), _LARGE)
_TEXT_TYPES = (
    *(*_SHARD_TYPES, pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
)
MAX_BATCH_ROWS = 256
_BATCH_BYTES = 4 << 20  # of text in memory at a time, if its documents are smaller
_BUFFER_BYTES = 1 << 20  # read from a file at a time
TEXT = "text"  # the column of a shard
_SCHEMA = pa.schema([(TEXT, pa.string())])


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard and its size."""

    name: str
    documents: int
    characters: int


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The dataset on the Hub that shards came from."""

    repository: str
    revision: str  # as configured; a branch may point to another commit later
    commit: str


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """The shards of one directory."""

    directory: Path
    shards: tuple[ShardFile, ...]  # validation last
    origin: Origin | None = None  # None means made from documents by this stage

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read shards.json. Raises DataError if it or a file that it lists is missing."""
        tree = read_index(directory / INDEX_FILE, FORMAT, what="shards")
        shards = tuple(ShardFile(**shard) for shard in tree["shards"])
        for shard in shards:
            if not (directory / shard.name).is_file():
                raise DataError(f"{directory / shard.name} is missing, {INDEX_FILE} lists it")
        origin = Origin(**tree["origin"]) if tree.get("origin") else None
        return cls(directory=directory, shards=shards, origin=origin)

    def write(self) -> None:
        """Write shards.json."""
        tree = {
            "format": FORMAT,
            "num_train": len(self.shards) - 1,
            "shards": [vars(shard) for shard in self.shards],
            **({"origin": vars(self.origin)} if self.origin else {}),
        }
        write_json(self.directory / INDEX_FILE, tree)

    @property
    def train(self) -> tuple[Path, ...]:
        """The paths of the training shards."""
        return tuple(self.directory / shard.name for shard in self.shards[:-1])

    @property
    def validation(self) -> Path:
        """The path of the validation shard."""
        return self.directory / self.shards[-1].name


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"shard_{number:05d}.parquet"


def write_shard(path: Path, documents: Sequence[str], *, scratch: Path) -> ShardFile:
    """Write `documents` to `path` atomically; `scratch` is on the same file system."""
    starts = range(0, len(documents), ROW_GROUP_DOCUMENTS)
    groups = (pa.array(documents[i : i + ROW_GROUP_DOCUMENTS], pa.string()) for i in starts)
    _write_groups(path, groups, scratch=scratch)
    return ShardFile(name=path.name, documents=len(documents), characters=sum(map(len, documents)))


def write_without_blanks(source: Path, path: Path, *, scratch: Path) -> None:
    """Write the documents of `source` that are not blank to `path`, in the same row groups."""
    with _open(source) as file:
        _write_groups(path, _groups_without_blanks(file, source), scratch=scratch)


def _groups_without_blanks(file: pq.ParquetFile, source: Path) -> Iterator[pa.ChunkedArray]:
    for group in range(file.num_row_groups):
        column = pa.chunked_array(_batches(file, group, source), _LARGE)
        said = column.filter(pc.call_function("invert", [_are_blank(column)]))
        if len(said):
            yield said.cast(pa.string())


def _write_groups(
    path: Path, groups: Iterable[pa.Array | pa.ChunkedArray], *, scratch: Path
) -> None:
    temporary = scratch / path.name
    # Text is nearly unique: a dictionary or statistics would only cost time and space.
    with pq.ParquetWriter(
        temporary, _SCHEMA, compression="zstd", use_dictionary=False, write_statistics=False
    ) as writer:
        for group in groups:
            HEARTBEAT.beat("writing documents")
            writer.write_table(pa.table({"text": group}, schema=_SCHEMA))
    move_into_place(temporary, path)


def read_batches(path: Path, *, column: str = TEXT) -> Iterator[list[str]]:
    """Yield the documents of a parquet file in order, a few MB at a time; none if it is empty.

    The column may have any type of strings but a dictionary's, or bytes that are UTF-8. A null
    document is read as an empty one. Raises DataError naming the file, with its row group and row,
    if it is no parquet file, is damaged, or has no such column or two.
    """
    with _open(path, column) as file:
        for group in range(file.num_row_groups):
            for batch in _batches(file, group, path, column):
                yield batch.to_pylist()


def row_group_sizes(path: Path) -> tuple[int, ...]:
    """Return the documents in each row group. Raises DataError as `read_batches` does."""
    with _open(path) as file:
        metadata = file.metadata
        return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


def inspect_shard(path: Path, *, name: str) -> tuple[ShardFile, int]:
    """Read a whole shard; return its sizes under `name`, and the number of blank documents.

    Blank ones (null, empty or only whitespace) do not count in its sizes. Raises DataError as
    `read_batches` does, and if it is empty or all are blank.
    """
    characters = blanks = 0
    with _open(path) as file:
        rows = file.metadata.num_rows
        for group in range(file.num_row_groups):
            for batch in _batches(file, group, path):
                are_blank = _are_blank(batch)
                blanks += pc.call_function("sum", [are_blank]).as_py() or 0
                lengths = pc.call_function("utf8_length", [batch])
                said = pc.call_function("if_else", [are_blank, 0, lengths])
                characters += pc.call_function("sum", [said]).as_py() or 0
    if not rows:
        raise DataError(
            f"{path} is empty", hint="a shard holds at least one document: remove the file"
        )
    if blanks == rows:
        raise DataError(
            f"{path} has {rows} documents, all of them blank", hint="a shard holds some text"
        )
    return ShardFile(name=name, documents=rows - blanks, characters=characters), blanks


def find_text_digest(path: Path) -> str | None:
    """Return 64 hex digits over the documents and row groups of a parquet file of text.

    Compression, encoding and the writer's name in the footer do not count: they differ between
    versions of pyarrow. None if the file is not parquet, or has another schema than a shard.
    Raises DataError if a row group is damaged.
    """
    try:
        opened = pq.ParquetFile(path)
    except _UNREADABLE:
        return None
    with opened as file:
        schema = file.schema_arrow
        if schema.names != ["text"] or schema.field("text").type not in _SHARD_TYPES:
            return None
        digest = hashlib.sha256()
        for group in range(file.num_row_groups):
            # Of 64-bit offsets, whatever the file has, so that both give the same digest.
            column = [*_batches(file, group, path)]
            parts = [_offsets_and_bytes(batch) for batch in column]
            # Lengths before bytes: otherwise moving a boundary between texts would go unnoticed.
            lengths = [np.diff(offsets) for offsets, _ in parts]
            digest.update(
                np.int64(sum(map(len, column))).tobytes() + b"".join(x.tobytes() for x in lengths)
            )
            for _, data in parts:
                digest.update(data)
        return digest.hexdigest()


def _offsets_and_bytes(
    chunk: pa.Array,
) -> tuple[npt.NDArray[np.int64], memoryview]:
    """Return the offsets of an array's values (n + 1,), and the bytes of all values."""
    # A slice of an array shares its buffers: the offsets begin at `chunk.offset`.
    _, starts, data = chunk.buffers()
    first = np.frombuffer(starts, np.int64)[chunk.offset :] if starts else np.zeros(1, np.int64)
    offsets = first[: len(chunk) + 1]
    return offsets, memoryview(data or b"")[offsets[0] : offsets[-1]]


def _are_blank(column: pa.Array | pa.ChunkedArray) -> Any:
    # utf8_is_space is false for an empty string.
    is_empty = pc.call_function("equal", [pc.call_function("binary_length", [column]), 0])
    return pc.call_function("or", [is_empty, pc.call_function("utf8_is_space", [column])])


def _open(path: Path, column: str = TEXT) -> pq.ParquetFile:
    try:
        # Without pre_buffer, which holds whole row groups in memory.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
    except _UNREADABLE as error:
        raise DataError(
            f"{path} cannot be read as parquet: {first_line(error)}", hint=_HINT
        ) from error
    schema = file.schema_arrow
    if (count := schema.names.count(column)) != 1:
        number = f"{count} columns" if count else "no column"
        raise DataError(
            f"{path} has {number} '{column}', its columns are: {', '.join(schema.names)}",
            hint="one document a row, in one column named text or as --set shards.column=NAME says",
        )
    kind = schema.field(column).type
    if not _is_text(kind):
        raise DataError(
            f"{path} has a column '{column}' of {kind}, not strings",
            hint="write the column as strings, one document a row, no dictionary or category",
        )
    return file


def _is_text(kind: pa.DataType) -> bool:
    """Return whether values of an Arrow type are strings, or bytes that may be UTF-8."""
    if isinstance(kind, pa.BaseExtensionType):  # JSON, for one
        return _is_text(kind.storage_type)
    return kind in _TEXT_TYPES


def _batches(
    file: pq.ParquetFile, group: int, path: Path, column: str = TEXT
) -> Iterator[pa.Array]:
    """Yield the documents of a row group as large strings, null ones as empty."""
    size = file.metadata.row_group(group)
    mean_bytes = max(1, size.total_byte_size // max(1, size.num_rows))
    num_rows = max(1, min(MAX_BATCH_ROWS, _BATCH_BYTES // mean_bytes))
    batches = file.iter_batches(num_rows, row_groups=[group], columns=[column], use_threads=False)
    row = sum(file.metadata.row_group(i).num_rows for i in range(group))
    while True:
        HEARTBEAT.beat("reading documents")
        try:
            batch = next(batches, None)
        except _UNREADABLE as error:
            raise DataError(
                f"{path} is damaged in row group {group}: {first_line(error)}", hint=_HINT
            ) from error
        if batch is None:
            return
        texts = _as_strings(batch.column(column))
        try:
            texts.validate(full=True)  # pyarrow does not check UTF-8 when it reads
        except pa.ArrowException as error:
            bad, reason = _find_bad_row(texts)
            raise DataError(
                f"{path} is not UTF-8 in row {row + bad} (row group {group}): {reason}",
                hint="rows are counted from 0; write that text again as UTF-8, or leave it out",
            ) from error
        row += len(texts)
        yield pc.fill_null(texts, "")


def _as_strings(values: Any) -> pa.Array:
    """Return an array of any text type as large strings, which may be no UTF-8."""
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    # By way of bytes, since a cast to strings would check them and not say which row is wrong.
    return values.cast(pa.large_binary()).view(_LARGE)


def _find_bad_row(texts: pa.Array) -> tuple[int, str]:
    """Return the first row (from 0) that is not UTF-8, and the reason."""
    for row, data in enumerate(texts.view(pa.large_binary()).to_pylist()):
        try:
            (data or b"").decode("utf-8")
        except UnicodeDecodeError as error:
            return row, error.reason
    return 0, "its offsets are out of order"
