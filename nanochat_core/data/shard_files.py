"""The shard format: parquet files with one column `text`, and `shards.json` beside them.

Row groups hold 1024 documents: what a reader takes into memory at once. The last shard is for
validation.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat_core.errors import DataError
from nanochat_core.job import sync_directory, write_json

FORMAT = 1
INDEX_FILE = "shards.json"
ROW_GROUP_DOCUMENTS = 1024
_SCHEMA = pa.schema([("text", pa.string())])


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard, and what is in it."""

    name: str
    documents: int
    characters: int


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """The shards of one directory."""

    directory: Path
    shards: tuple[ShardFile, ...]  # validation last

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read shards.json. Raises DataError when the directory has none, or not its files."""
        path = directory / INDEX_FILE
        try:
            tree: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{directory} holds no shards: {error}") from error
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise DataError(
                f"{path} is not of format {FORMAT}",
                hint="it was written by another version of nanochat-flows",
            )
        shards = tuple(ShardFile(**shard) for shard in tree["shards"])
        for shard in shards:
            if not (directory / shard.name).is_file():
                raise DataError(f"{directory / shard.name} is missing, {INDEX_FILE} lists it")
        return cls(directory=directory, shards=shards)

    def write(self) -> None:
        """Write shards.json."""
        tree = {
            "format": FORMAT,
            "num_train": len(self.shards) - 1,
            "shards": [vars(shard) for shard in self.shards],
        }
        write_json(self.directory / INDEX_FILE, tree)

    @property
    def train(self) -> tuple[Path, ...]:
        """Paths of the training shards."""
        return tuple(self.directory / shard.name for shard in self.shards[:-1])

    @property
    def validation(self) -> Path:
        """Path of the validation shard."""
        return self.directory / self.shards[-1].name


def shard_name(number: int) -> str:
    """File name of shard `number`."""
    return f"shard_{number:05d}.parquet"


def write_shard(path: Path, documents: Sequence[str], *, scratch: Path) -> ShardFile:
    """Write `documents` to `path`, whole or not at all; `scratch` is on the same file system."""
    temporary = scratch / path.name
    with pq.ParquetWriter(
        temporary, _SCHEMA, compression="zstd", use_dictionary=False, write_statistics=False
    ) as writer:
        for i in range(0, len(documents), ROW_GROUP_DOCUMENTS):
            group = documents[i : i + ROW_GROUP_DOCUMENTS]
            writer.write_table(pa.table({"text": pa.array(group, pa.string())}, schema=_SCHEMA))
    move_into_place(temporary, path)
    return ShardFile(name=path.name, documents=len(documents), characters=sum(map(len, documents)))


def move_into_place(temporary: Path, path: Path) -> None:
    """Rename a finished file so that `path` is whole or absent, even after a power cut."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_directory(path.parent)


def read_row_groups(path: Path) -> Iterator[list[str]]:
    """The documents of a shard, a row group at a time.

    Raises DataError naming the file when it is no parquet file, is damaged, has no `text` column
    of strings, or is empty; a null document is read as an empty one.
    """
    with _open(path) as file:
        for group in range(file.num_row_groups):
            yield _read_group(file, group, path).to_pylist()


def row_group_sizes(path: Path) -> tuple[int, ...]:
    """Documents in each row group. Raises DataError as `read_row_groups` does."""
    with _open(path) as file:
        metadata = file.metadata
        return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


def inspect_shard(path: Path) -> ShardFile:
    """Read a whole shard to count what is in it. Raises DataError as `read_row_groups` does."""
    characters = 0
    with _open(path) as file:
        documents = file.metadata.num_rows
        for group in range(file.num_row_groups):
            lengths = pc.call_function("utf8_length", [_read_group(file, group, path)])
            characters += pc.call_function("sum", [lengths]).as_py() or 0
    return ShardFile(name=path.name, documents=documents, characters=characters)


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as parquet: {_first_line(error)}",
            hint="delete it and make the shards again",
        ) from error
    schema = file.schema_arrow
    if "text" not in schema.names:
        raise DataError(
            f"{path} has no column 'text', its columns are: {', '.join(schema.names)}",
            hint="a shard is a parquet file with one document a row in a column named text",
        )
    if not (
        pa.types.is_string(schema.field("text").type)
        or pa.types.is_large_string(schema.field("text").type)
    ):
        raise DataError(f"{path} has a column 'text' of {schema.field('text').type}, not strings")
    if file.metadata.num_rows == 0:
        raise DataError(f"{path} is empty", hint="a shard holds at least one document")
    return file


def _read_group(file: pq.ParquetFile, group: int, path: Path) -> pa.ChunkedArray:
    try:
        column = file.read_row_group(group, columns=["text"], use_threads=False)["text"]
        column.validate(full=True)  # pyarrow reads invalid UTF-8 without a word
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is damaged in row group {group}: {_first_line(error)}",
            hint="delete it and make the shards again",
        ) from error
    return pc.fill_null(column, "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
