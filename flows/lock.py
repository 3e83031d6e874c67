"""The right to build one fingerprint on this machine, so that two runs do not do the same work.

A kernel file lock: it ends with its process, however that ends. It only saves money; that there is
one artifact in the end comes from put-if-absent of its manifest. The lock file also tells a waiter
who is building.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from flows.fingerprint import short
from nanochat_core.errors import StageError

_SECONDS_BETWEEN_TRIES = 0.2
_TRIES_FOR_A_NOTE = 100  # 10 ms apart


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who is building."""

    pid: int
    host: str
    since: float  # unix seconds

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def lock_path(work: Path, stage: str, fingerprint: str) -> Path:
    """The lock of one fingerprint, beside its work directory."""
    return work / stage / f"{short(fingerprint)}.lock"


def work_directory(work: Path, stage: str, fingerprint: str) -> Path:
    """Where the job of one fingerprint runs, and where an unfinished one is gone on with."""
    return work / stage / short(fingerprint)


@contextlib.contextmanager
def hold(path: Path, on_wait: Callable[[Owner | None], None]) -> Generator[None]:
    """Hold the lock at `path`; while another process has it, wait.

    `on_wait` is called once for each owner that is waited for (None: it has not said who it is).
    Whoever waited looks for the artifact again: the other one may have built it. Raises StageError
    when the lock file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error) from error
    with file:
        told: set[Owner | None] = set()
        while not _try_lock(file, fcntl.LOCK_EX):
            owner = _read_owner(path)
            if owner not in told:
                told.add(owner)
                on_wait(owner)
            time.sleep(_SECONDS_BETWEEN_TRIES)
        try:
            _write_owner(file)
        except OSError as error:
            raise _not_writable(path, error) from error
        try:
            yield
        finally:
            file.truncate(0)  # closing the file gives the lock back


def find_owner(path: Path) -> Owner | None:
    """Who holds the lock at `path`, or None when nobody does, or nobody who says so in a second."""
    try:
        with path.open(encoding="utf-8") as file:
            for _ in range(_TRIES_FOR_A_NOTE):
                if _try_lock(file, fcntl.LOCK_SH):
                    return None
                if owner := _read_owner(path):
                    return owner
                time.sleep(0.01)
    except FileNotFoundError:
        pass
    return None


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_owner(file: IO[str]) -> None:
    owner = Owner(pid=os.getpid(), host=socket.gethostname(), since=time.time())
    file.truncate(0)
    json.dump(asdict(owner), file)
    file.flush()


def _read_owner(path: Path) -> Owner | None:
    """None when the note is not whole yet."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None


def _not_writable(path: Path, error: OSError) -> StageError:
    return StageError(
        f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
        hint="check that NANOCHAT_HOME is a directory of yours on a disk with free space",
    )
