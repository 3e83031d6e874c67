"""Checkpoints of a job on several nodes: each node sends its shards straight to the store.

Every rank writes its shard on its own machine. Its node uploads it

    {stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/tensors-00001.safetensors

and reports key, size and sha256 to node 0, which records beside rank 0's own shard that this one is
complete: rank 0 commits when all are. The stored checkpoint names each shard by its key. `epoch` is
the fencing token of the lease, so that attempts write to keys of their own.
"""

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from flows.artifacts.checkpoints import place_of, step_of
from flows.artifacts.transfer import in_parallel
from flows.build.messages import CheckpointShard
from flows.identity.manifest import File
from infra.launch.background import poll
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
) -> None:
    """Upload these ranks' complete shards and delete them here. Raises StoreError, OSError.

    `on_shard` is called with each one that is in the store.
    """

    def send(directory: Path, rank: int) -> None:
        step = step_of(directory)
        record = _record(directory, rank)
        entry = json.loads(record.read_text(encoding="utf-8"))
        key = _key(job, step, rank, epoch=epoch)
        file = File(path=_file(rank), size=entry["size"], sha256=entry["sha256"], key=key)
        store.upload(file.key, directory / file.path)
        # A store may report success for a part of the bytes.
        if (size := store.head(file.key).size) != file.size:
            raise ArtifactError(f"{file.key} arrived with {size} bytes instead of {file.size}")
        on_shard(CheckpointShard(step=step, rank=rank, file=file))
        # Rank 0 alone commits, so this node never resumes from its own shard: it fetches the whole
        # checkpoint. The record goes first, so that a crash leaves no record without its bytes.
        record.unlink()
        (directory / file.path).unlink()

    written = [
        (directory, rank)
        for directory in _unfinished(job.checkpoints)
        for rank in ranks
        if _record(directory, rank).exists()
    ]
    for _ in in_parallel(lambda item: send(*item), written, threads=_THREADS):
        pass


def note_shard(job: Job, shard: CheckpointShard, *, epoch: int) -> None:
    """Record beside rank 0's shard that another node's is in the store, for rank 0 to commit.

    Raises ArtifactError if the shard is under another key than its own; FileNotFoundError if the
    job dropped this checkpoint meanwhile.
    """
    file, key = shard.file, _key(job, shard.step, shard.rank, epoch=epoch)
    if (file.path, file.key) != (_file(shard.rank), key):
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
) -> Generator[None]:
    """Upload what `ranks` write while the block runs, and once more at its end.

    Errors go to `on_error`; the upload is retried at the next poll.
    """

    def look() -> None:
        with reporting_errors(job.checkpoints, on_error):
            upload_shards(store, job, ranks, epoch=epoch, on_shard=on_shard)

    with poll(look, every=SECONDS_BETWEEN_LOOKS):
        yield


@contextlib.contextmanager
def reporting_errors(directory: Path, on_error: Callable[[NanochatError], None]) -> Generator[None]:
    """Report errors of transfers in the block to `on_error` instead of raising them."""
    try:
        yield
    except FileNotFoundError:
        pass  # the job pruned this checkpoint while it was sent; newer ones exist
    except NanochatError as error:
        on_error(error)
    except OSError as error:
        why = reason_of(error)
        on_error(StageError(f"a checkpoint's files in {directory}: {why}"))


def _unfinished(checkpoints: Path) -> Iterator[Path]:
    """Yield directories of uncommitted checkpoints, newest first."""
    for directory in sorted(checkpoints.glob("step-*"), reverse=True):
        if not (directory / _COMMIT).exists():
            yield directory


def _key(job: Job, step: int, rank: int, *, epoch: int) -> str:
    return f"{place_of(job, step)}/parts-{epoch}/{_file(rank)}"


def _file(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"tensors-{rank:05d}.safetensors"


def _record(directory: Path, rank: int) -> Path:
    """Return the path of the record that marks a rank's file as complete until the commit."""
    return directory / f"tensors-{rank:05d}.json"
