"""Work in progress on one fingerprint: who is building it, and how far an unfinished job came."""

import json
from dataclasses import dataclass
from pathlib import Path

from flows.artifacts import checkpoints
from flows.identity.fingerprint import Identity
from flows.identity.rebuilds import NONE, find_rebuild_mark, rebuild_of
from flows.leases import file_lock
from flows.leases.lease import find_holder
from infra.storage.base import Store


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The newest checkpoint of an unfinished job."""

    step: int
    total: int
    in_store: bool  # whether it is to be fetched first

    def __str__(self) -> str:
        return f"step {self.step}/{self.total}{', from the store' if self.in_store else ''}"


def find_builder(store: Store, work: Path, identity: Identity) -> str | None:
    """Who is building this fingerprint now, as a person reads it, or None.

    A lease of this home whose kernel lock nobody holds is that of a process that was killed.
    """
    stage, fingerprint = identity.stage, identity.fingerprint
    owner = file_lock.find_owner(file_lock.lock_path(work, stage, fingerprint))
    dead = None if owner else file_lock.find_home_id(work.parent)
    builder = find_holder(store, stage, fingerprint, dead=dead) or owner
    return str(builder) if builder else None


def find_resume(store: Store, work: Path, identity: Identity) -> Resume | None:
    """Where a job would go on: of two checkpoints alike, the one on this machine is used."""
    stage, fingerprint = identity.stage, identity.fingerprint
    mark = find_rebuild_mark(store, stage, fingerprint)
    rebuild = mark.id if mark else NONE
    directory = file_lock.work_directory(work, stage, fingerprint)
    here = _find_here(directory) if rebuild_of(directory) == rebuild else None
    steps = checkpoints.find_steps(store, stage, fingerprint, rebuild=rebuild)
    if steps and (here is None or steps[0] > here.step):
        return Resume(step=steps[0], total=steps[1], in_store=True)
    return here


def _find_here(directory: Path) -> Resume | None:
    """The newest checkpoint of a job that was stopped, by the COMMIT.json written last."""
    found: list[Resume] = []
    for path in directory.glob("checkpoints/step-*/COMMIT.json"):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            step, total = int(tree["step"]), int(tree["total"])
            found.append(Resume(step=step, total=total, in_store=False))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # the job will not use it either
    return max(found, key=lambda resume: resume.step, default=None)
