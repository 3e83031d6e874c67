"""Locks that show which runs of a home have a live process: HOME/runs/RUN.lock.

A command that runs a flow or a stage holds the lock of its run, and removes the file at the end.
The kernel releases the lock when the process ends, however it ends: a file whose lock is free
belongs to a run that ended without recording its end. The next command records it
(flows.plan.dead_runs.py). Runs on workers have no lock: Prefect resumes or ends them.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO

from flows.leases import file_lock
from infra.storage.files import try_flock, writing
from nanochat_core.errors import StageError


@contextlib.contextmanager
def hold(home: Path, run: str, *, store: str) -> Generator[None]:
    """Hold the lock of the run with this id while the block runs; `store` has its record.

    Several processes may hold it, as commands that build stages of one run. An error that ends the
    block leaves the file, in case the record could not be ended. Raises StageError if the file
    cannot be written.
    """
    path = _path(home, run)
    with writing(path, StageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _open(path)
    with file:
        with writing(path, StageError):
            file.truncate(0)
            file.write(f"{store}\n")
            file.flush()
        yield
        # Only the last of several holders can lock it exclusively.
        if try_flock(file):
            path.unlink(missing_ok=True)


def is_held(home: Path, run: str) -> bool:
    """Return whether a process of this machine holds the lock of the run."""
    return file_lock.is_held(_path(home, run))


def forget_dead(home: Path, store: str, end: Callable[[str], bool]) -> None:
    """Call `end` with each run of `store` whose processes have ended.

    It is called by one command after the other until it returns True; then the run is forgotten.
    A process that begins to hold the lock of the run again waits meanwhile.
    """
    for path in sorted(home.glob("runs/*.lock")):
        # No file: another command was first. No permission: a home of another user.
        with contextlib.suppress(OSError), path.open("r+", encoding="utf-8") as file:
            is_dead = try_flock(file) and file.read() == f"{store}\n"
            if is_dead and end(path.name.removesuffix(".lock")):
                path.unlink()


def _path(home: Path, run: str) -> Path:
    return home / "runs" / f"{run}.lock"


def _open(path: Path) -> IO[str]:
    """Return the lock file, locked for as long as it is open."""
    while True:
        file = path.open("a", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_nlink:  # 0: removed between the two calls
            return file
        file.close()
