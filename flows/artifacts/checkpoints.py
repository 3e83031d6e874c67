"""Checkpoints of unfinished jobs in the store, so that any machine can resume them.

{stage}/{fingerprint}/checkpoints/step-0000200/{attempt}/...            the files, uploaded first
{stage}/{fingerprint}/checkpoints/step-0000200/{attempt}/COMMIT.json    put last
{stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/... flows/building/checkpoint_shards.py

They are keyed by the fingerprint: another run, another node count or a colleague resumes them. Each
attempt to send one has a prefix of its own, so nothing that was committed is ever overwritten. With
the tensors go the job's events and segments, which become the artifact's log.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.artifacts.checkpoint_records import (
    COMMIT,
    FORMAT,
    PLACE,
    Log,
    StoredCheckpoint,
    committed,
    open_record,
    open_whole,
)
from flows.artifacts.transfer import fetch_file
from flows.identity.manifest import File
from flows.identity.records import OtherFormat, encode_record
from flows.identity.ref import ArtifactRef
from infra.storage.base import Store
from infra.storage.files import sha256_of, writing
from nanochat_core.errors import ArtifactError, StageError
from nanochat_core.job import Job, check_checkpoints, check_format, sync_directory, write_json

KEEP = 2  # steps in the store; an older one is removed once newer ones are committed
_RECORDS = ("events.jsonl", "segments.jsonl")  # of the job, next to its checkpoints


def send(
    store: Store,
    job: Job,
    directory: Path,
    *,
    owner: str,
    fencing_token: int,
    check_lease: Callable[[], None],
    check_wanted: Callable[[], None] = lambda: None,
    there: Collection[File] = (),
) -> int:
    """Upload the checkpoint in `directory`, a copy of one of `job`'s directories; return its step.

    Files that are `there` in the store, by name and contents, need not be in `directory`.
    `check_lease` raises if the job's lease is lost; `check_wanted`, called after every few MB, if
    this checkpoint need not be sent any more. Raises StoreError.
    """
    check_lease()  # only saves work: the call right before the commit decides
    commit = _commit(directory)
    here = f"{place_of(job, commit['step'])}/"  # equal files of an older step go with that step
    attempt = f"{here}{uuid.uuid4().hex[:12]}"
    known = {(f.path, f.size, f.sha256): f for f in there if f.key.startswith(here)}
    files: list[File] = []
    for name, item in commit["files"].items():
        size, sha256 = item["size"], item["sha256"]
        file = known.get((name, size, sha256))
        if file is None:
            file = File(path=name, size=size, sha256=sha256, key=f"{attempt}/{name}")
            store.upload(file.key, directory / name, on_bytes=lambda _: check_wanted())
        files.append(file)
    files += _send_records(store, job, attempt)
    record = StoredCheckpoint(
        step=commit["step"],
        total=commit["total"],
        files=tuple(files),
        commit=commit,
        owner=owner,
        epoch=fencing_token,
    )
    # The record last: without it the files are no checkpoint, and an owner that was replaced while
    # it uploaded must not commit.
    check_lease()
    store.put(f"{attempt}/{COMMIT}", encode_record(asdict(record), format=FORMAT))
    return record.step


def prune(store: Store, job: Job, *, sent: int) -> None:
    """Remove all but the newest KEEP steps up to the one just sent. Raises StoreError.

    Earlier ones that were never committed are removed too. What an error leaves is removed next
    time.
    """
    # The job passed over later steps when it began. They stay, and do not count, or they would push
    # out the steps that it can resume from.
    root = _root(job)
    kept = list(dict.fromkeys(step for step, _ in committed(store, root) if step <= sent))[:KEEP]
    keys = [entry.key.removeprefix(f"{root}/") for entry in store.list(f"{root}/step-")]
    for step in dict.fromkeys(int(found[1]) for found in map(PLACE.match, keys) if found):
        if step < sent and step not in kept:
            _remove(store, place_of(job, step))


def restore(store: Store, job: Job, *, log: Log) -> None:
    """Fetch the store's newest whole checkpoint, unless `job` has one as new on this machine.

    A damaged one is reported and skipped for the one before; it stays, because the damage may be
    this machine's. Raises StoreError if the store cannot be reached, StageError if this machine's
    disk refuses or if a checkpoint, here or in the store, is of another format.
    """
    check_checkpoints(job.checkpoints)
    _drop_parts(job)
    # All of them, before any work: checkpoints saved from here on prune the older steps.
    stored = [(step, _open(store, place)) for step, place in committed(store, _root(job))]
    for step, found in stored:
        local = job.checkpoints / f"step-{step:07d}"
        # Steps are zero-padded in names, so paths compare as steps do.
        if any(d >= local and is_whole(d) for d in job.checkpoints.glob("step-*")):
            return
        try:
            if isinstance(found, ArtifactError):
                raise found
            log(f"fetching checkpoint step {found.step}/{found.total} from the store")
            with writing(local, StageError):
                _fetch(store, found, local, job)
            return
        except ArtifactError as error:
            log(f"checkpoint step {step} in the store is damaged and is passed over: {error}")


def restore_step(store: Store, job: Job, step: int, *, commit: str, log: Log) -> None:
    """Make the checkpoint of `step` with digest `commit` the only one of `job` on this machine.

    Later ones are set aside; earlier ones and those never committed are removed. Step 0 leaves
    none. Raises ArtifactError if the store has no such checkpoint whole, StoreError, StageError.
    """
    check_checkpoints(job.checkpoints)
    local = job.checkpoints / f"step-{step:07d}"
    is_here = step > 0 and is_whole(local) and commit_of(local) == commit
    for directory in list(job.checkpoints.glob("step-*")):
        if directory == local and is_here:
            continue
        if directory > local and (directory / COMMIT).exists():
            _set_aside(directory)
        else:
            shutil.rmtree(directory)
    if is_here or not step:
        return
    damage = [f"checkpoint step {step} is not in {store.url}/{_root(job)}"]
    for found in open_whole(store, _root(job), step=step, log=damage.append):
        if _digest(found.commit) == commit:
            log(f"fetching checkpoint step {step}/{found.total} from the store")
            try:
                _fetch(store, found, local, job)
            except ArtifactError as error:  # another copy of the step may be whole
                damage.append(str(error))
            else:
                return
    raise ArtifactError(damage[-1], hint="node 0 sends it again when it is started again")


def settle(job: Job) -> Path | None:
    """Return the job's newest whole checkpoint on this machine and clear away all later ones.

    A later one is damaged and is set aside, or was never committed and is removed. None means that
    there is no whole one. Raises StageError if one is of another format.
    """
    check_checkpoints(job.checkpoints)
    for directory in sorted(job.checkpoints.glob("step-*"), reverse=True):
        if not (directory / COMMIT).exists():
            shutil.rmtree(directory)
        elif is_whole(directory):
            return directory
        else:
            _set_aside(directory)
    return None


def is_stored(store: Store, job: Job, directory: Path) -> bool:
    """Return whether the store has this very checkpoint. Raises StoreError."""
    commit, step = commit_of(directory), step_of(directory)
    stored = open_whole(store, _root(job), step=step)
    return any(_digest(found.commit) == commit for found in stored)


def _commit(directory: Path) -> dict[str, Any]:
    return json.loads((directory / COMMIT).read_text(encoding="utf-8"))


def commit_of(directory: Path) -> str:
    """Return a digest that identifies a whole local checkpoint among others of its step."""
    return _digest(_commit(directory))


def step_of(directory: Path) -> int:
    """Return the step that a checkpoint's directory, or a copy of it, is named after."""
    return int(directory.name.rpartition("step-")[2])


def is_of_last_step(directory: Path) -> bool:
    """Return True if the job has no step left to do after this local checkpoint."""
    try:
        commit = _commit(directory)
    except FileNotFoundError:  # the job dropped it meanwhile
        return False
    return commit["step"] >= commit["total"]


def find_steps(store: Store, ref: ArtifactRef) -> tuple[int, int] | None:
    """Return step and total of the newest checkpoint in the store. For display: not verified."""
    stored = open_whole(store, ref.checkpoints_prefix)
    return next(((f.step, f.total) for f in stored), None)


def forget(store: Store, ref: ArtifactRef) -> None:
    """Remove every checkpoint of an artifact that exists by now."""
    _remove(store, ref.checkpoints_prefix)


def _drop_parts(job: Job) -> None:
    """Remove checkpoints that lack files: one node's part of those of several nodes."""
    for directory in list(job.checkpoints.glob("step-*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            commit = _commit(directory)
            if not all((directory / name).exists() for name in commit["files"]):
                shutil.rmtree(directory)


def is_whole(directory: Path) -> bool:
    """Return whether a local directory is a checkpoint, every byte as it was committed."""
    try:
        commit = _commit(directory)
        return all(
            sha256_of(directory / name) == item["sha256"] for name, item in commit["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _root(job: Job) -> str:
    return ArtifactRef(job.stage, job.fingerprint).checkpoints_prefix


def place_of(job: Job, step: int) -> str:
    """Return the prefix of the store's keys for a job's checkpoint of `step`."""
    return ArtifactRef(job.stage, job.fingerprint).checkpoint_prefix(step)


def _send_records(store: Store, job: Job, attempt: str) -> Iterator[File]:
    """Store what the job has logged so far; return the files."""
    for name in _RECORDS:
        path = job.directory / name
        # One read: the job keeps appending, and a second one would not match the sha256.
        if path.exists() and (data := path.read_bytes()):
            key = f"{attempt}/{name}"
            store.put(key, data)
            sha256 = hashlib.sha256(data).hexdigest()
            yield File(path=name, size=len(data), sha256=sha256, key=key)


def _set_aside(directory: Path) -> None:
    """Rename a checkpoint so that it no longer counts as one; its files stay for a look."""
    aside = directory.with_name(f"aside-{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    sync_directory(directory.parent)  # a power cut must not bring the name back


def _digest(commit: Mapping[str, Any]) -> str:
    """Return a digest of the step and the files that a commit names."""
    text = json.dumps([commit["step"], commit["files"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _open(store: Store, place: str) -> StoredCheckpoint | ArtifactError:
    """Return the checkpoint at `place`, or why its record is damaged.

    Raises StageError if it, or its record, is of another format.
    """
    try:
        found = open_record(store, place)
        check_format(found.commit.get("format"), where=f"{store.url}/{place}")
        return found
    except OtherFormat as error:
        hint = "resume with that version, or start again: `nanochat run PROFILE --force STAGE`"
        raise StageError(str(error), hint=hint) from error
    except ArtifactError as error:
        return error


def _fetch(store: Store, found: StoredCheckpoint, local: Path, job: Job) -> None:
    """Fetch a checkpoint to `local`, whole or not at all. Raises ArtifactError if it is damaged."""
    fresh = local.with_name(f".{local.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        for file in found.files:
            path = fresh / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            # The job appends to its records: a hard link would change the store's object.
            is_record = file.path in _RECORDS
            fetch_file(store, file, path, of=f"checkpoint step {found.step}", private=is_record)
            with path.open("rb") as fetched:
                os.fsync(fetched.fileno())  # before the rename that makes the directory count
        write_json(fresh / COMMIT, found.commit)
        # The records move before the rename: a checkpoint that counts must not lack its events.
        # One of this machine's own is not replaced.
        for record, own in ((fresh / name, job.directory / name) for name in _RECORDS):
            if own.exists() and own.stat().st_size:
                record.unlink(missing_ok=True)
            elif record.exists():
                record.replace(own)
        # A crash between the next two lines costs one more fetch: the store still has it.
        shutil.rmtree(local, ignore_errors=True)
        fresh.rename(local)
        sync_directory(local.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove(store: Store, place: str) -> None:
    """Remove all objects under a prefix, COMMIT.json first."""
    keys = [entry.key for entry in store.list(f"{place}/")]
    # A commit that outlived its files would be taken for a damaged checkpoint.
    for key in sorted(keys, key=lambda key: not key.endswith(f"/{COMMIT}")):
        store.delete(key)
