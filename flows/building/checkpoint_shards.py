"""Checkpoints of a job on several nodes: each node sends its shards straight to the store.

Every rank writes its shard on its own machine. A node other than 0 uploads its own at once,

    {stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/tensors-00001.safetensors

and reports key, size and sha256 to node 0, which records next to rank 0's shard that this one is
complete: rank 0 commits when all are. The stored checkpoint names each shard by its key. `epoch` is
the fencing token of the lease, so that attempts write to keys of their own.

Ranks begin a save when the one before is committed, or was given up because the job is being
stopped: then what is still being uploaded of that one is of no use.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from flows.artifacts.checkpoints import place_of, step_of
from flows.building.messages import CheckpointShard
from flows.identity.manifest import File
from infra.launch.background import poll
from infra.launch.mirror import Superseded, reporting_errors
from infra.polling import POLL_SECONDS
from infra.storage.base import Store
from nanochat_core.errors import NanochatError
from nanochat_core.job import Job, write_json


def note_shard(job: Job, shard: CheckpointShard) -> None:
    """Record next to rank 0's shard that another node's is in the store, for rank 0 to commit.

    Raises FileNotFoundError if the job dropped this checkpoint meanwhile.
    """
    directory = job.checkpoints / f"step-{shard.step:07d}"
    directory.mkdir(parents=True, exist_ok=True)  # rank 0 may be slower
    write_json(_record_of(directory, shard.rank), {"size": shard.size, "sha256": shard.sha256})


def file_of(job: Job, shard: CheckpointShard, *, epoch: int) -> File:
    """Return the file of a shard in the store, as the stored checkpoint names it."""
    path = f"tensors-{shard.rank:05d}.safetensors"
    key = f"{place_of(job, shard.step)}/parts-{epoch}/{path}"
    return File(path=path, size=shard.size, sha256=shard.sha256, key=key)


@contextlib.contextmanager
def uploading_shards(
    store: Store,
    job: Job,
    ranks: Sequence[int],
    *,
    epoch: int,
    on_shard: Callable[[CheckpointShard], None],
    on_error: Callable[[NanochatError], None],
) -> Generator[None]:
    """Upload what `ranks` write while the block runs, and once more at its end.

    Errors go to `on_error`; the upload is retried at the next poll.
    """

    def newest() -> Path | None:
        return max(job.checkpoints.glob("step-*"), default=None)

    def send(directory: Path, rank: int) -> None:
        def check(count: int = 0) -> None:
            if directory != newest():
                raise Superseded(f"{directory} was given up")

        check()
        record = _record_of(directory, rank)
        entry = json.loads(record.read_text(encoding="utf-8"))
        shard = CheckpointShard(step=step_of(directory), rank=rank, **entry)
        file = file_of(job, shard, epoch=epoch)
        store.upload(file.key, directory / file.path, on_bytes=check)
        on_shard(shard)
        # Rank 0 alone commits, so this node never resumes from its own shard: it fetches the whole
        # checkpoint. The record goes first: a crash leaves no record without its bytes.
        record.unlink()
        (directory / file.path).unlink()

    def look() -> None:
        # A checkpoint that the job pruned while it was sent is no error: newer ones exist.
        with reporting_errors(job.checkpoints, on_error), contextlib.suppress(FileNotFoundError):
            if (directory := newest()) is not None:
                for rank in [rank for rank in ranks if _record_of(directory, rank).exists()]:
                    send(directory, rank)

    with poll(look, every=POLL_SECONDS):
        yield


def _record_of(directory: Path, rank: int) -> Path:
    """Return the path of the record that marks a rank's file as complete until the commit."""
    return directory / f"tensors-{rank:05d}.json"
