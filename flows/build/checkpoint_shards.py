"""Checkpoints of a job on several nodes: shards travel through the store to node 0.

Every rank writes its shard on its own machine, and rank 0 commits when it finds all shards beside
its own. So each other node uploads what its ranks have written

    {stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/tensors-00001.safetensors
    {stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/tensors-00001.json   put last

and node 0 downloads it, the record of a file after its bytes. `epoch` is the fencing token of the
lease: shards of another attempt have another epoch and are ignored. A shard is uploaded once: the
stored checkpoint names it by the key it already has.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flows.artifacts.checkpoints import fetch_file, place_of, step_of
from flows.artifacts.transfer import in_parallel
from flows.identity.manifest import File
from flows.identity.record_types import read_record
from flows.identity.records import encode_record, find_document
from infra.launch.background import poll
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, NanochatError, StageError, reason_of
from nanochat_core.job import Job, write_json

FORMAT = 2
SECONDS_BETWEEN_LOOKS = 0.25
_THREADS = 4
_COMMIT = "COMMIT.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointShard:
    """One rank's file of one checkpoint, uploaded to the store."""

    step: int
    file: File


def upload_shards(
    store: Store, job: Job, ranks: Sequence[int], *, epoch: int
) -> list[CheckpointShard]:
    """Upload these ranks' complete shards and delete them here. Raises StoreError, OSError."""

    def send(directory: Path, rank: int) -> CheckpointShard:
        step = step_of(directory)
        record = _record(directory, rank)
        entry = json.loads(record.read_text(encoding="utf-8"))
        key = f"{place_of(job, step)}/{_parts(epoch)}/{_file(rank)}"
        file = File(path=_file(rank), size=entry["size"], sha256=entry["sha256"], key=key)
        store.upload(file.key, directory / file.path)
        # The record is put after the bytes have arrived: node 0 fetches as soon as it exists.
        if (size := store.head(file.key).size) != file.size:
            raise ArtifactError(f"{file.key} arrived with {size} bytes instead of {file.size}")
        store.put(_record_key(file.key), encode_record(asdict(file), format=FORMAT))
        # Rank 0 alone commits, so this node never resumes from its own shard: it fetches the whole
        # checkpoint. The record goes first, so that a crash leaves no record without its bytes.
        record.unlink()
        (directory / file.path).unlink()
        return CheckpointShard(step=step, file=file)

    written = [
        (directory, rank)
        for directory in _unfinished(job.checkpoints)
        for rank in ranks
        if _record(directory, rank).exists()
    ]
    return list(in_parallel(lambda item: send(*item), written, threads=_THREADS))


def gather_shards(
    store: Store, job: Job, ranks: Sequence[int], *, epoch: int
) -> list[CheckpointShard]:
    """Download the shards of these ranks that exist for a checkpoint that is being written here.

    Raises StoreError, ArtifactError if a file arrives damaged, and OSError.
    """

    def gather(directory: Path, rank: int) -> CheckpointShard | None:
        step = step_of(directory)
        key = f"{place_of(job, step)}/{_parts(epoch)}/{_file(rank)}"
        tree = find_document(store, _record_key(key), format=FORMAT)
        if tree is None:
            return None
        where = f"{store.url}/{_record_key(key)}"
        file = read_record(File, tree, where=where, what="the record of a file")
        if (file.path, file.key) != (_file(rank), key):
            raise ArtifactError(f"{where} is the record of {file.key}")
        # Under a name of its own until it is verified: rank 0 may look into the directory.
        fresh = directory / f".{file.path}.{uuid.uuid4().hex}.tmp"
        fetch_file(store, file, fresh)
        # Rank 0 commits as soon as it finds the records, so the record follows the rename.
        fresh.rename(directory / file.path)
        write_json(_record(directory, rank), {"size": file.size, "sha256": file.sha256})
        return CheckpointShard(step=step, file=file)

    missing = [
        (directory, rank)
        for directory in _unfinished(job.checkpoints)
        for rank in ranks
        if not _record(directory, rank).exists()
    ]
    found = in_parallel(lambda item: gather(*item), missing, threads=_THREADS)
    return [part for part in found if part is not None]


@contextlib.contextmanager
def uploading_shards(
    store: Store,
    job: Job,
    ranks: Sequence[int],
    *,
    epoch: int,
    on_error: Callable[[NanochatError], None],
) -> Generator[None]:
    """Upload what `ranks` write while the block runs, and once more at its end.

    Errors go to `on_error`; the upload is retried at the next poll.
    """

    def look() -> None:
        with reporting_errors(job.checkpoints, on_error):
            upload_shards(store, job, ranks, epoch=epoch)

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


def _parts(epoch: int) -> str:
    return f"parts-{epoch}"


def _file(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint."""
    return f"tensors-{rank:05d}.safetensors"


def _record(directory: Path, rank: int) -> Path:
    """Return the path of the record that marks a rank's file as complete until the commit."""
    return directory / f"tensors-{rank:05d}.json"


def _record_key(key: str) -> str:
    return f"{os.path.splitext(key)[0]}.json"
