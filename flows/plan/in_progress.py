"""Find the last checkpoint of unfinished work on a fingerprint."""

import json
from dataclasses import dataclass
from pathlib import Path

from flows.artifacts import checkpoints
from flows.identity.fingerprint import Identity
from flows.leases import file_lock
from infra.storage.base import Store


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The newest checkpoint of an unfinished job."""

    step: int
    total: int
    in_store: bool  # the store has it, this machine has to fetch it

    def __str__(self) -> str:
        return f"step {self.step}/{self.total}{', from the store' if self.in_store else ''}"


def find_resume(store: Store, work: Path, identity: Identity) -> Resume | None:
    """Return the checkpoint that a job would resume from; on a tie the one on this machine."""
    ref = identity.ref
    here = _find_here(file_lock.work_directory(work, ref))
    steps = checkpoints.find_steps(store, ref)
    if steps and (here is None or steps[0] > here.step):
        return Resume(step=steps[0], total=steps[1], in_store=True)
    return here


def _find_here(directory: Path) -> Resume | None:
    """Return the newest checkpoint on this machine that has its COMMIT.json, written last."""
    found: list[Resume] = []
    for path in directory.glob("checkpoints/step-*/COMMIT.json"):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            step, total = int(tree["step"]), int(tree["total"])
            found.append(Resume(step=step, total=total, in_store=False))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # the job will not use it either
    return max(found, key=lambda resume: resume.step, default=None)
