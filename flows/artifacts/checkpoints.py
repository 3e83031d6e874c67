"""Checkpoints of unfinished jobs in the store, so that any machine can go on with the same work.

{stage}/{fingerprint}/checkpoints/step-0000200/{attempt}/...            the files, uploaded first
{stage}/{fingerprint}/checkpoints/step-0000200/{attempt}/COMMIT.json    put last
{stage}/{fingerprint}/checkpoints/anew/run.json                           flows/identity/rebuilds.py
{stage}/{fingerprint}/checkpoints/step-0000200/parts-{epoch}/...  flows/build/checkpoint_shards.py
{stage}/{fingerprint}/checkpoints/nodes/...                             flows/build/messages.py

They are keyed by the fingerprint: another run, another node count or a colleague continues them.
Each attempt to send one has a place of its own, so nothing that was committed is ever written to
again. With the tensors go the job's events and segments, which the artifact will keep as its log.
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
from typing import Any, TypeAlias

from flows.artifacts.checkpoint_records import (
    COMMIT,
    FORMAT,
    PLACE,
    StoredCheckpoint,
    committed,
    open_record,
)
from flows.identity.manifest import File
from flows.identity.rebuilds import NONE, rebuild_of
from flows.identity.records import OtherFormat, encode_record
from infra.storage.base import BadObject, ObjectNotFound, Store
from infra.storage.files import sha256_of
from nanochat_core.errors import ArtifactError, StageError
from nanochat_core.job import Job, check_checkpoints, check_format, sync_directory, write_json

KEEP = 2  # steps in the store; an older one goes after newer ones are there
_RECORDS = ("events.jsonl", "segments.jsonl")  # of the job, beside its checkpoints
_FETCHES = 3  # damage on the way is mended by fetching again

Tell: TypeAlias = Callable[[str], None]


def send(
    store: Store,
    job: Job,
    directory: Path,
    *,
    owner: str,
    epoch: int,
    fence: Callable[[], None],
    there: Collection[File] = (),
) -> int:
    """Store the checkpoint in `directory`, a copy of a directory of `job`'s; returns its step.

    Files that are `there` already, by name and contents, are not sent again.
    `fence` raises when the job is not ours any more; it is asked before anything is sent, and again
    right before the commit. Raises StoreError, and ArtifactError when an upload is not all there.
    """
    fence()
    commit = json.loads((directory / COMMIT).read_text(encoding="utf-8"))
    attempt = f"{place_of(job, commit['step'])}/{uuid.uuid4().hex[:12]}"
    committed: dict[str, Any] = commit["files"]
    known = {(file.path, file.size, file.sha256): file for file in there}
    files: list[File] = []
    for name, item in committed.items():
        file = known.get((name, item["size"], item["sha256"]))
        if file is None:
            file = File(
                path=name, size=item["size"], sha256=item["sha256"], key=f"{attempt}/{name}"
            )
            store.upload(file.key, directory / name)
        files.append(file)
    files += _send_records(store, job, attempt)
    for file in files:
        if (size := store.head(file.key).size) != file.size:
            raise ArtifactError(f"{file.key} arrived with {size} bytes instead of {file.size}")
    record = StoredCheckpoint(
        step=commit["step"],
        total=commit["total"],
        files=tuple(files),
        commit=commit,
        owner=owner,
        epoch=epoch,
        rebuild=rebuild_of(job.directory),
    )
    fence()
    store.put(f"{attempt}/{COMMIT}", encode_record(asdict(record), format=FORMAT))
    return record.step


def prune(store: Store, job: Job, *, sent: int) -> None:
    """Remove all but the newest steps up to the one just sent. Raises StoreError.

    Earlier ones that were never committed, of which only parts arrived, go too.
    What is left goes next time. Later steps are what the job passed over when it began; they stay
    as they are, and do not crowd out what it can go on from.
    """
    steps = dict.fromkeys(step for step, _ in committed(store, _root(job)) if step <= sent)
    kept = list(steps)[:KEEP]
    for step in _steps(store, job):
        if step < sent and step not in kept:
            _remove(store, place_of(job, step))


def restore(store: Store, job: Job, *, tell: Tell) -> None:
    """Bring the store's newest whole checkpoint to `job`, unless it has one as new of its own.

    One from before the rebuild that the job belongs to does not count.
    A damaged one is named to `tell` and passed over for the one before; it stays, for the damage
    may be this machine's. Raises StoreError when the store cannot be asked, StageError when this
    machine's disk refuses, or when a checkpoint here or in the store is of another format.
    """
    check_checkpoints(job.checkpoints)
    stored = committed(store, _root(job))
    for _, place in stored:  # all of them: what is saved from here on prunes older steps
        _check_format(store, place)
    for step, place in stored:
        local = job.checkpoints / f"step-{step:07d}"
        if any(d >= local and is_whole(d) for d in job.checkpoints.glob("step-*")):
            return
        try:
            found = open_record(store, place)
            if found.rebuild != rebuild_of(job.directory):
                continue
            tell(f"fetching checkpoint step {found.step}/{found.total} from the store")
            _fetch(store, found, local, job)
        except ArtifactError as error:
            tell(f"checkpoint step {step} in the store is damaged and is passed over: {error}")
            continue
        except OSError as error:
            raise StageError(
                f"{local} cannot be written: {(error.strerror or str(error)).lower()}",
                hint="check that NANOCHAT_HOME is a directory of yours on a disk with free space",
            ) from error
        return


def restore_step(store: Store, job: Job, step: int, *, commit: str, tell: Tell) -> None:
    """Have the checkpoint of `step` whose commit is `commit`, and no other that counts.

    Later ones are set aside, earlier ones and what was never committed go. Step 0: have none.
    Raises ArtifactError when the store has no such checkpoint whole, StoreError, StageError.
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
    damage = f"checkpoint step {step} is not in {store.url}/{_root(job)}"
    for found_step, place in committed(store, _root(job)):
        if found_step != step:
            continue
        try:
            found = open_record(store, place)
            if _digest(found.commit) == commit:
                tell(f"fetching checkpoint step {step}/{found.total} from the store")
                _fetch(store, found, local, job)
                return
        except ArtifactError as error:
            damage = str(error)
    raise ArtifactError(damage, hint="node 0 sends it again when it is started again")


def settle(job: Job) -> Path | None:
    """The job's newest whole checkpoint on this machine, after which there is nothing.

    What is no whole checkpoint is set aside, or removed if it was never committed. Raises
    StageError when one is of another format.
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
    """Whether the store has this very checkpoint. Raises StoreError."""
    commit, step = commit_of(directory), step_of(directory)
    for found_step, place in committed(store, _root(job)):
        with contextlib.suppress(ArtifactError):
            if found_step == step and _digest(open_record(store, place).commit) == commit:
                return True
    return False


def commit_of(directory: Path) -> str:
    """What tells the commit of a whole local checkpoint from others of its step."""
    return _digest(json.loads((directory / COMMIT).read_text(encoding="utf-8")))


def step_of(directory: Path) -> int:
    """The step of a checkpoint's directory."""
    return int(directory.name.removeprefix("step-"))


def is_of_last_step(directory: Path) -> bool:
    """Return True if the job has no step left to do after this local checkpoint."""
    try:
        commit = json.loads((directory / COMMIT).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the job dropped it meanwhile
        return False
    return commit["step"] >= commit["total"]


def find_steps(
    store: Store, stage: str, fingerprint: str, *, rebuild: str = NONE
) -> tuple[int, int] | None:
    """Step and total of the newest checkpoint in the store; for people, nothing is verified."""
    root = f"{stage}/{fingerprint}/checkpoints"
    for _, place in committed(store, root):
        try:
            found = open_record(store, place)
        except ArtifactError:
            continue
        if found.rebuild == rebuild:
            return found.step, found.total
    return None


def forget(store: Store, stage: str, fingerprint: str) -> None:
    """Remove every checkpoint of an artifact that exists by now, or that is made anew."""
    _remove(store, f"{stage}/{fingerprint}/checkpoints")


def is_whole(directory: Path) -> bool:
    """Whether a local directory is a checkpoint whose every byte was committed."""
    try:
        commit = json.loads((directory / COMMIT).read_text(encoding="utf-8"))
        return all(
            sha256_of(directory / name) == item["sha256"] for name, item in commit["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _root(job: Job) -> str:
    return f"{job.stage}/{job.fingerprint}/checkpoints"


def place_of(job: Job, step: int) -> str:
    """Where the store has what belongs to a job's checkpoint of `step`."""
    return f"{_root(job)}/step-{step:07d}"


def _send_records(store: Store, job: Job, attempt: str) -> Iterator[File]:
    """What the job told so far. It goes on telling, so a copy is taken in one read."""
    for name in _RECORDS:
        path = job.directory / name
        if path.exists() and (data := path.read_bytes()):
            key = f"{attempt}/{name}"
            store.put(key, data)
            sha256 = hashlib.sha256(data).hexdigest()
            yield File(path=name, size=len(data), sha256=sha256, key=key)


def _set_aside(directory: Path) -> None:
    """Give a checkpoint a name that nothing counts."""
    aside = directory.with_name(f"aside-{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    sync_directory(directory.parent)


def _digest(commit: Mapping[str, Any]) -> str:
    """Of the files that a commit names, and the step."""
    text = json.dumps([commit["step"], commit["files"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _steps(store: Store, job: Job) -> list[int]:
    """Every step of which the store has anything."""
    root = f"{_root(job)}/"
    keys = [entry.key.removeprefix(root) for entry in store.list(f"{root}step-")]
    return list(dict.fromkeys(int(found[1]) for found in map(PLACE.match, keys) if found))


def _check_format(store: Store, place: str) -> None:
    """Raise StageError if the checkpoint or its record is of another format; damage passes."""
    try:
        check_format(open_record(store, place).commit.get("format"), where=f"{store.url}/{place}")
    except OtherFormat as error:
        hint = "resume with that version, or begin anew: `nanochat run PROFILE --force STAGE`"
        raise StageError(str(error), hint=hint) from error
    except ArtifactError:
        return


def _fetch(store: Store, found: StoredCheckpoint, local: Path, job: Job) -> None:
    """Bring a checkpoint to its place: whole, or not at all, or an ArtifactError."""
    fresh = local.with_name(f".{local.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        for file in found.files:
            fetch_file(store, file, fresh / file.path)
        write_json(fresh / COMMIT, found.commit)
        for name in _RECORDS:
            if (fresh / name).exists():
                _give_back(fresh / name, job.directory / name)
        shutil.rmtree(local, ignore_errors=True)
        fresh.rename(local)
        sync_directory(local.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def fetch_file(store: Store, file: File, path: Path) -> None:
    """Bring one file, durable and as it was committed, or raise ArtifactError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    what = ""
    for _ in range(_FETCHES):
        try:
            store.fetch(file.key, path, size=file.size)
        except (ObjectNotFound, BadObject) as error:
            raise ArtifactError(f"{file.key} {error.fault}") from None
        sha256 = sha256_of(path)
        if sha256 == file.sha256:
            with path.open("rb") as fetched:
                os.fsync(fetched.fileno())
            return
        what = f"{file.key} has sha256 {sha256[:12]}, committed {file.sha256[:12]}"
        path.unlink()
    raise ArtifactError(what)


def _give_back(record: Path, target: Path) -> None:
    """The job's records from the store, where this machine has none of its own."""
    if target.exists() and target.stat().st_size:
        record.unlink()
    else:
        record.chmod(0o644)  # the job appends to it
        record.replace(target)


def _remove(store: Store, place: str) -> None:
    """Remove what lies under a checkpoint's place, its COMMIT.json first."""
    keys = [entry.key for entry in store.list(f"{place}/")]
    for key in sorted(keys, key=lambda key: not key.endswith(f"/{COMMIT}")):
        store.delete(key)
