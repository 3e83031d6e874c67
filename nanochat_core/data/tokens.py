"""Stage `tokens`: every shard's text as token ids.

Shards are tokenised in parallel processes; a job that resumes skips those that are finished.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nanochat_core.data.array_files import new_array, write_array
from nanochat_core.data.processes import map_in_processes, usable_cores
from nanochat_core.data.shard_files import (
    ShardSet,
    read_batches,
    row_group_sizes,
)
from nanochat_core.data.token_files import TokenSet, TokenShard, dtype_for, find_lengths
from nanochat_core.job import Job, move_into_place
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import Tokenizer


def run(job: Job) -> dict[str, Any]:
    """Tokenise every shard that is not done yet, and write tokens.json."""
    shards = ShardSet.open(job.inputs["shards"])
    tokenizer_directory = job.inputs["tokenizer"]
    tokenizer = Tokenizer.load(tokenizer_directory)
    scratch = job.directory / "scratch"
    scratch.mkdir(exist_ok=True)
    progress = Progress(job.events)
    paths = [*shards.train, shards.validation]
    progress.start(len(paths), unit="shard")
    work = partial(
        tokenize_shard,
        tokenizer_directory=tokenizer_directory,
        output=job.output,
        scratch=scratch,
        dtype=dtype_for(tokenizer.vocab_size),
    )
    done: list[TokenShard] = []
    for shard in map_in_processes(work, paths, processes=usable_cores()):
        done.append(shard)
        progress.step(len(done), tokens=sum(shard.tokens for shard in done))
    TokenSet(
        directory=job.output,
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        tokenizer=tokenizer.digest(),
        shards=tuple(done),
    ).write()
    shutil.rmtree(scratch)
    return {
        "documents": sum(shard.documents for shard in done),
        "tokens": sum(shard.tokens for shard in done),
        "validation_tokens": done[-1].tokens,
    }


def tokenize_shard(
    path: Path, *, tokenizer_directory: Path, output: Path, scratch: Path, dtype: str
) -> TokenShard:
    """Write the ids and lengths of one shard, unless an earlier attempt has written them.

    Raises DataError if the shard cannot be read.
    """
    # The lengths are written last: a shard that has them is done.
    name = path.stem
    row_groups = row_group_sizes(path)
    lengths = find_lengths(output / f"{name}.lengths.npy")
    if lengths is None:
        tokenizer = Tokenizer.load(tokenizer_directory)
        temporary = scratch / name
        lengths = _write_ids(path, temporary, tokenizer=tokenizer, dtype=dtype)
        move_into_place(temporary, output / f"{name}.tokens")
        with new_array(temporary, lengths.dtype, lengths.shape) as file:
            write_array(file, lengths)
        move_into_place(temporary, output / f"{name}.lengths.npy")
    return TokenShard(
        name=name, documents=len(lengths), tokens=int(lengths.sum()), row_groups=row_groups
    )


def _write_ids(
    shard: Path, path: Path, *, tokenizer: Tokenizer, dtype: str
) -> npt.NDArray[np.uint32]:
    """Write bos and ids of every document to `path`; return their lengths (documents,)."""
    bos = np.array([tokenizer.bos], dtype=np.uint32)
    kind = np.dtype(dtype).newbyteorder("<")
    lengths: list[int] = []
    with path.open("wb") as file:
        for texts in read_batches(shard):
            documents = tokenizer.encode_batch(texts)
            lengths += [1 + len(ids) for ids in documents]
            stream = np.concatenate([part for ids in documents for part in (bos, ids)])
            write_array(file, stream.astype(kind))
    return np.array(lengths, dtype="<u4")
