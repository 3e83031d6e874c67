"""Locks that show which runs of a home have a live process: HOME/runs/RUN.lock.

A command that runs a flow or a stage holds the lock of its run, and removes the file at the end.
The kernel releases the lock when the process ends, however it ends: a file whose lock is free
belongs to a run whose end is not recorded everywhere. The next command records it
(flows.plan.dead_runs.py). Runs on workers have no lock: Prefect resumes or ends them.

The file has the URL of the run's store, and a second line if only Prefect does not know the end.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import IO

from flows.leases import file_lock
from infra.storage.files import try_flock, writing
from nanochat_core.errors import StageError

FINISHED = "finished"  # the second line


@contextlib.contextmanager
def hold(home: Path, run: str, *, store: str, unreported: Sequence[str] = ()) -> Generator[None]:
    """Hold the lock of the run with this id while the block runs; `store` has its record.

    Several processes may hold it, as commands that build stages of one run. An error that ends the
    block leaves the file, in case the record could not be ended. So does FINISHED in `unreported`.
    Raises StageError if the file cannot be written.
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
        if unreported:
            with contextlib.suppress(OSError):  # the run has finished, also on a full disk
                file.write(f"{unreported[0]}\n")
                file.flush()
        # Only the last of several holders can lock it exclusively.
        elif try_flock(file):
            path.unlink(missing_ok=True)


def is_held(home: Path, run: str) -> bool:
    """Return whether a process of this machine holds the lock of the run."""
    return file_lock.is_held(_path(home, run))


def forget_dead(home: Path, store: str, end: Callable[[str, bool], bool]) -> None:
    """Call `end` with each run of `store` whose processes have ended, and whether it has finished.

    One command after the other does so until it returns True; then the run is forgotten. A process
    that begins to hold the lock of the run again waits meanwhile.
    """
    for path in sorted(home.glob("runs/*.lock")):
        # No file: another command was first. No permission: a home of another user.
        with contextlib.suppress(OSError), path.open("r+", encoding="utf-8") as file:
            lines = file.read().splitlines() if try_flock(file) else []
            run = path.name.removesuffix(".lock")
            if lines[:1] == [store] and end(run, lines[1:] == [FINISHED]):
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
