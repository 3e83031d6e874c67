"""The row format, and random access to rows for training.

`train.rows` and `val.rows` are arrays (N, T+1) of raw little-endian ids: a row's first T ids are
the inputs, its last T the targets. `rows.json` has the metadata. The order of training is a
function of the step: resuming needs no saved reader state, on any number of ranks.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from nanochat_core.data.array_files import read_index
from nanochat_core.data.token_files import map_ids
from nanochat_core.errors import DataError
from nanochat_core.job import write_json
from nanochat_core.runtime.seeding import seed_for

FORMAT = 1
INDEX_FILE = "rows.json"
SPLITS = ("train", "val")
BLOCK_ROWS = 1024  # shuffled within blocks, so that a step reads few regions of a large file


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of one split."""

    ids: npt.NDArray[Any]  # (N, T+1) u16 or u32, mapped from disk
    vocab_size: int
    tokenizer: str  # digest of the tokenizer that made the ids

    @classmethod
    def open(cls, directory: Path, split: str) -> Self:
        """Open `split`, "train" or "val". Raises DataError if the files are not rows."""
        assert split in SPLITS
        tree = read_index(directory / INDEX_FILE, FORMAT, what="rows")
        num_rows, row_len = tree[f"num_{split}"], tree["sequence_len"] + 1
        ids = map_ids(directory / f"{split}.rows", dtype=tree["dtype"], count=num_rows * row_len)
        return cls(
            ids=ids.reshape(num_rows, row_len),
            vocab_size=tree["vocab_size"],
            tokenizer=tree["tokenizer"],
        )

    @property
    def num_rows(self) -> int:
        """The number of rows in the split."""
        return len(self.ids)

    @property
    def sequence_len(self) -> int:
        """The number of targets per row."""
        return self.ids.shape[1] - 1

    def check_tokenizer(self, digest: str) -> None:
        """Raise DataError unless the rows were made with the tokenizer of this digest."""
        if digest != self.tokenizer:
            raise DataError(
                f"the rows were made with tokenizer {self.tokenizer[:12]}, "
                f"the one given is {digest[:12]}",
                hint="make tokens and rows again with this tokenizer",
            )

    def check_model(self, *, vocab_size: int, sequence_len: int) -> None:
        """Raise DataError unless the rows are of a model's vocabulary and length."""
        for name, ours, its in (
            ("vocab_size", self.vocab_size, vocab_size),
            ("sequence_len", self.sequence_len, sequence_len),
        ):
            if ours != its:
                raise DataError(
                    f"the rows have {name} {ours}, the model has {its}",
                    hint="make the rows again with the model's settings",
                )

    def batch(
        self, step: int, rows_per_step: int, *, seed: int, rank: int = 0, world: int = 1
    ) -> npt.NDArray[Any]:
        """Return the rows of step `step` for rank `rank` of `world`, (b, T+1) u16 or u32.

        A rank gets every `world`-th row of `step_ids`, starting at `rank`, so `b` may differ by one
        between ranks.
        """
        assert 0 <= rank < world
        return self.ids[self.step_ids(step, rows_per_step, seed)[rank::world]]

    def take(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows with these numbers (n,), as (n, T+1)."""
        return self.ids[ids].astype(np.int64)

    def step_ids(self, step: int, rows_per_step: int, seed: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows of step `step` (rows_per_step,).

        Each epoch visits every row once, in its own order: blocks of neighbouring rows are
        shuffled, and so are the rows inside each block. Steps continue across epochs, so the result
        depends only on the arguments.
        """
        assert rows_per_step > 0
        first, count = step * rows_per_step, rows_per_step
        parts: list[npt.NDArray[np.int64]] = []
        while count > 0:
            epoch, start = divmod(first, self.num_rows)
            stop = min(start + count, self.num_rows)
            parts.append(_epoch_ids(self.num_rows, seed, epoch, start, stop))
            first += stop - start
            count -= stop - start
        return np.concatenate(parts)


def _epoch_ids(
    num_rows: int, seed: int, epoch: int, start: int, stop: int
) -> npt.NDArray[np.int64]:
    """Return the row numbers at positions `start` to `stop` of one epoch's order."""
    num_blocks = -(-num_rows // BLOCK_ROWS)
    blocks = permutation(num_blocks, seed_for(seed, "blocks", epoch))
    sizes = np.minimum(BLOCK_ROWS, num_rows - blocks * BLOCK_ROWS)
    # Only the last block of the file is smaller; it can be anywhere in the order of the epoch.
    ends = np.cumsum(sizes)
    first, last = np.searchsorted(ends, (start, stop - 1), side="right")
    parts = [
        block * BLOCK_ROWS + permutation(size, seed_for(seed, "rows", epoch, block))
        for block, size in zip(
            blocks[first : last + 1].tolist(), sizes[first : last + 1].tolist(), strict=True
        )
    ]
    before = ends[first] - sizes[first]
    return np.concatenate(parts)[start - before : stop - before]


def write_index(directory: Path, tree: dict[str, Any]) -> None:
    """Write rows.json."""
    write_json(directory / INDEX_FILE, {"format": FORMAT, **tree})


@lru_cache(maxsize=16)  # neighbouring steps read the same few blocks
def permutation(n: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the numbers below `n` in an order given by `seed` (n,), read-only."""
    # Sorted by a hash (splitmix64) rather than drawn from numpy's generators, whose streams may
    # change between releases: the order of training must not.
    key = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    key ^= key >> np.uint64(31)
    order = np.argsort(key, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
