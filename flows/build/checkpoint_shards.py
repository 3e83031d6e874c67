"""Checkpoints of a job on several nodes: each node sends its shards straight to the store.

Every rank writes its shard on its own machine. Its node uploads it at once, beside the others,

    {stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/tensors-00001.safetensors

and reports key, size and sha256 to node 0, which records beside rank 0's own shard that this one is
complete: rank 0 commits when all are. The stored checkpoint names each shard by its key. `epoch` is
the fencing token of the lease, so that attempts write to keys of their own.

Ranks begin a save when the one before is committed, or when the job is being stopped and that one
was given up: then what is still going up is of no use.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from flows.artifacts.checkpoints import place_of, step_of
from flows.artifacts.transfer import in_parallel
from flows.build.messages import CheckpointShard
from flows.identity.manifest import File
from infra.launch.background import poll
from infra.launch.mirror import Superseded
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError, StageError, reason_of
from nanochat_core.job import Job, write_json

SECONDS_BETWEEN_LOOKS = 0.25
_THREADS = 4
_COMMIT = "COMMIT.json"


def upload_shards(
    store: Store,
    job: Job,
    ranks: Sequence[int],
    *,
    epoch: int,
    on_shard: Callable[[CheckpointShard], None],
    keep: bool = False,
    is_wanted: Callable[[Path, int], bool] | None = None,
) -> None:
    """Upload these ranks' complete shards of checkpoints that are not committed yet.

    `on_shard` is called with each one that is in the store; it is deleted here, unless `keep`.
    `is_wanted` is asked before and during each upload, with directory and rank; by default what is
    of the newest save is wanted. Raises StoreError, OSError, and Superseded for an upload that was
    given up.
    """
    is_wanted = is_wanted or (lambda directory, rank: is_newest(directory))

    def send(directory: Path, rank: int) -> None:
        step = step_of(directory)

        def check(count: int) -> None:
            if not is_wanted(directory, rank):
                raise Superseded(f"step {step} was given up")

        record = _record(directory, rank)
        entry = json.loads(record.read_text(encoding="utf-8"))
        key = _key(job, step, rank, epoch=epoch)
        file = File(path=file_of(rank), size=entry["size"], sha256=entry["sha256"], key=key)
        store.upload(file.key, directory / file.path, on_bytes=check)
        # A store may report success for a part of the bytes.
        if (size := store.head(file.key).size) != file.size:
            raise ArtifactError(f"{file.key} arrived with {size} bytes instead of {file.size}")
        on_shard(CheckpointShard(step=step, rank=rank, file=file))
        # Rank 0 alone commits, so another node never resumes from its own shard: it fetches the
        # whole checkpoint. The record goes first: a crash leaves no record without its bytes.
        if not keep:
            record.unlink()
            (directory / file.path).unlink()

    # The records go when the checkpoint is committed.
    written = [
        (directory, rank)
        for directory in job.checkpoints.glob("step-*")
        for rank in ranks
        if _record(directory, rank).exists() and is_wanted(directory, rank)
    ]
    for _ in in_parallel(lambda item: send(*item), written, threads=_THREADS):
        pass


def note_shard(job: Job, shard: CheckpointShard, *, epoch: int) -> None:
    """Record beside rank 0's shard that another node's is in the store, for rank 0 to commit.

    Raises ArtifactError if the shard is under another key than its own; FileNotFoundError if the
    job dropped this checkpoint meanwhile.
    """
    file, key = shard.file, _key(job, shard.step, shard.rank, epoch=epoch)
    if (file.path, file.key) != (file_of(shard.rank), key):
        raise ArtifactError(f"{file.key} is reported as {key}")
    directory = job.checkpoints / f"step-{shard.step:07d}"
    directory.mkdir(parents=True, exist_ok=True)  # rank 0 may be slower
    write_json(_record(directory, shard.rank), {"size": file.size, "sha256": file.sha256})


@contextlib.contextmanager
def uploading_shards(
    store: Store,
    job: Job,
    ranks: Sequence[int],
    *,
    epoch: int,
    on_shard: Callable[[CheckpointShard], None],
    on_error: Callable[[NanochatError], None],
    keep: bool = False,
    is_wanted: Callable[[Path, int], bool] | None = None,
    sending: "threading.Lock | None" = None,  # a function before Python 3.13
) -> Generator[None]:
    """Upload what `ranks` write while the block runs, and once more at its end.

    The lock `sending` is held meanwhile. Errors go to `on_error`; the upload is retried at the next
    poll.
    """

    def look() -> None:
        with sending or contextlib.nullcontext(), reporting_errors(job.checkpoints, on_error):
            upload_shards(
                store, job, ranks, epoch=epoch, on_shard=on_shard, keep=keep, is_wanted=is_wanted
            )

    with poll(look, every=SECONDS_BETWEEN_LOOKS):
        yield


@contextlib.contextmanager
def reporting_errors(directory: Path, on_error: Callable[[NanochatError], None]) -> Generator[None]:
    """Report errors of transfers in the block to `on_error` instead of raising them."""
    try:
        yield
    except (FileNotFoundError, Superseded):
        pass  # the job pruned this checkpoint, or gave it up, while it was sent: newer ones exist
    except NanochatError as error:
        on_error(error)
    except OSError as error:
        why = reason_of(error)
        on_error(StageError(f"a checkpoint's files in {directory}: {why}"))


def is_newest(directory: Path) -> bool:
    """Return whether no later save has begun, of a checkpoint's directory."""
    return directory == max(directory.parent.glob("step-*"), default=None)


def is_committed(directory: Path) -> bool:
    """Return whether all files of a checkpoint are complete, on whatever nodes."""
    return (directory / _COMMIT).exists()


def _key(job: Job, step: int, rank: int, *, epoch: int) -> str:
    return f"{place_of(job, step)}/parts-{epoch}/{file_of(rank)}"


def file_of(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"tensors-{rank:05d}.safetensors"


def _record(directory: Path, rank: int) -> Path:
    """Return the path of the record that marks a rank's file as complete until the commit."""
    return directory / f"tensors-{rank:05d}.json"
