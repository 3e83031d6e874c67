"""Stage `rows`: documents packed into training rows."""

import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanochat_core.config import RowsConfig
from nanochat_core.data.array_files import write_array
from nanochat_core.data.packing import batches, pack
from nanochat_core.data.row_files import SPLITS, write_index
from nanochat_core.data.token_files import TokenSet, TokenShard
from nanochat_core.errors import DataError
from nanochat_core.job import Job, move_into_place
from nanochat_core.runtime.progress import Progress

_CHUNK_ROWS = 1024  # rows buffered in memory per write


def run(job: Job) -> dict[str, Any]:
    """Pack both splits, and write rows.json."""
    config = RowsConfig.from_tree(job.config["rows"])
    tokens = TokenSet.open(job.inputs["tokens"])
    progress = Progress(job.events)
    scratch = job.directory / "scratch"
    scratch.mkdir(exist_ok=True)
    counts: dict[str, tuple[int, int, int]] = {}
    # The last shard is for validation.
    for split, shards in zip(SPLITS, (tokens.shards[:-1], tokens.shards[-1:]), strict=True):
        total = sum(shard.tokens for shard in shards)
        progress.message(f"packing {total:,} tokens for {split}")
        temporary = scratch / split
        num_rows, placed = write_rows(temporary, tokens, shards, config=config, progress=progress)
        if num_rows == 0:
            raise DataError(
                f"{total} tokens for {split} fill no row of {config.sequence_len + 1}",
                hint="give more text or a smaller rows.sequence_len",
            )
        move_into_place(temporary, job.output / f"{split}.rows")
        counts[split] = (num_rows, total, placed)
    shutil.rmtree(scratch)
    num_train, total, placed = counts["train"]
    tree = {
        "sequence_len": config.sequence_len,
        "dtype": tokens.dtype,
        "vocab_size": tokens.vocab_size,
        "tokenizer": tokens.tokenizer,
        "policy": config.policy,
        "num_train": num_train,
        "num_val": counts["val"][0],
        "tokens": total,  # of the training documents
        "waste": 1 - placed / total,  # share of the tokens that are in no row
    }
    write_index(job.output, tree)
    names = ("num_train", "num_val", "tokens", "waste")
    return {name: tree[name] for name in names}


def write_rows(
    path: Path,
    tokens: TokenSet,
    shards: Sequence[TokenShard],
    *,
    config: RowsConfig,
    progress: Progress,
) -> tuple[int, int]:
    """Pack the documents of `shards` in order; return the numbers of rows and of tokens in them."""
    row_len = config.sequence_len + 1
    text = _Documents(tokens, shards)
    chunk = np.empty((_CHUNK_ROWS, row_len), dtype=np.dtype(tokens.dtype).newbyteorder("<"))
    num_rows = placed = 0
    # An upper bound for progress: cropping loses tokens.
    most = max(1, sum(shard.tokens for shard in shards) // row_len)
    progress.start(most, unit="row")
    with path.open("wb") as file:
        for row in pack(
            text.batches(),
            row_len=row_len,
            policy=config.policy,
            buffer_documents=config.buffer_documents,
        ):
            places = chunk[num_rows % _CHUNK_ROWS]
            end = 0
            for document, start, length in row:
                if start > 0:  # a later piece of a document that was split
                    places[end] = tokens.bos
                    end += 1
                places[end : end + length] = text.slice(document, start, length)
                end += length
                placed += length
            num_rows += 1
            if num_rows % _CHUNK_ROWS == 0:
                write_array(file, chunk)
                progress.step(min(num_rows, most))
        write_array(file, chunk[: num_rows % _CHUNK_ROWS])
    return num_rows, placed


class _Documents:
    """The documents of several shards, numbered consecutively."""

    def __init__(self, tokens: TokenSet, shards: Sequence[TokenShard]) -> None:
        self._tokens = tokens
        self._shards = shards
        self._ids: list[npt.NDArray[Any]] = []
        self._starts = array("q")  # of each document, in its shard
        self._shard_of = array("i")

    def batches(self) -> Iterator[list[int]]:
        """Yield the lengths of the documents, in the batches in which they arrive."""
        for shard in self._shards:
            lengths = self._tokens.read_lengths(shard).tolist()
            self._ids.append(self._tokens.read_tokens(shard))
            start = position = 0
            for size in batches(shard.row_groups):
                batch = lengths[start : start + size]
                for length in batch:
                    self._starts.append(position)
                    self._shard_of.append(len(self._ids) - 1)
                    position += length
                start += size
                yield batch

    def slice(self, document: int, start: int, length: int) -> npt.NDArray[Any]:
        """Return tokens `start` to `start + length` of a document that has arrived (length,)."""
        begin = self._starts[document] + start
        return self._ids[self._shard_of[document]][begin : begin + length]
