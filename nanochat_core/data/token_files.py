"""The token format: each shard as one stream of ids, and the length of each document in it.

Every document begins with bos; there is no end token. Besides `tokens.json` there are two files per
shard: `shard_00000.tokens`, raw little-endian ids, and `shard_00000.lengths.npy`, the u32 number of
tokens of each document, bos included. The last shard is for validation.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from nanochat_core.data.array_files import read_index
from nanochat_core.errors import DataError
from nanochat_core.job import write_json

FORMAT = 1
INDEX_FILE = "tokens.json"


@dataclass(frozen=True, kw_only=True)
class TokenShard:
    """One tokenised shard."""

    name: str  # the shard's file name without its ending
    documents: int
    tokens: int
    row_groups: tuple[int, ...]  # documents in each of the shard's row groups


@dataclass(frozen=True, kw_only=True)
class TokenSet:
    """The tokens of one directory."""

    directory: Path
    dtype: str  # of the .tokens files: "uint16" or "uint32", little-endian
    vocab_size: int
    bos: int
    tokenizer: str  # digest of the tokenizer
    shards: tuple[TokenShard, ...]

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read tokens.json. Raises DataError if the directory has none."""
        tree = read_index(directory / INDEX_FILE, FORMAT, what="tokens")
        del tree["format"]
        shards = [
            TokenShard(**{**shard, "row_groups": tuple(shard["row_groups"])})
            for shard in tree.pop("shards")
        ]
        return cls(directory=directory, shards=tuple(shards), **tree)

    def write(self) -> None:
        """Write tokens.json."""
        tree = asdict(self)
        del tree["directory"]
        write_json(self.directory / INDEX_FILE, {"format": FORMAT, **tree})

    def read_tokens(self, shard: TokenShard) -> npt.NDArray[Any]:
        """Map the shard's ids (tokens,) from disk. Raises DataError if some are missing."""
        path = self.directory / f"{shard.name}.tokens"
        return map_ids(path, dtype=self.dtype, count=shard.tokens)

    def read_lengths(self, shard: TokenShard) -> npt.NDArray[np.uint32]:
        """Return tokens per document (documents,), bos included. Raises DataError if damaged."""
        lengths = find_lengths(self.directory / f"{shard.name}.lengths.npy")
        if lengths is None or len(lengths) != shard.documents or lengths.sum() != shard.tokens:
            raise DataError(
                f"{self.directory / shard.name}.lengths.npy does not fit {INDEX_FILE}",
                hint="delete the directory and make the tokens again",
            )
        return lengths


def dtype_for(vocab_size: int) -> str:
    """Return the smallest dtype that holds every id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def map_ids(path: Path, *, dtype: str, count: int) -> npt.NDArray[Any]:
    """Map the `count` little-endian ids of `path` (count,) from disk, read-only.

    Raises DataError if the file is missing or of another size.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    size = path.stat().st_size if path.is_file() else 0
    # An empty file cannot be mapped.
    if size != count * kind.itemsize or count == 0:
        raise DataError(
            f"{path} has {size} bytes, {count * kind.itemsize} are expected",
            hint="it is damaged: delete its directory and run again",
        )
    return np.memmap(path, dtype=kind, mode="r")


def find_lengths(path: Path) -> npt.NDArray[np.uint32] | None:
    """Return the content of a .lengths.npy file, or None if it is missing or damaged."""
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError):
        return None
