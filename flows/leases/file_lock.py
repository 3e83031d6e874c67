"""File locks of one machine (flock): one process builds a fingerprint or fetches into a directory.

The kernel releases a lock when its process ends, however it ends. So a process that holds the lock
of a fingerprint knows that an earlier owner in the same home is dead. Between machines there are
leases (flows/leases/lease.py). The lock file holds a note that names its owner, for those who wait.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from flows.identity.ref import ArtifactRef
from infra.polling import ASK_SECONDS, POLL_SECONDS, wait_until
from infra.storage.files import try_flock, writing
from nanochat_core.errors import StageError
from nanochat_core.runtime.process_start import boot_id


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lock, as its note in the lock file names it."""

    pid: int
    host: str
    run: str | None = None  # id of the run that it builds for

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def lock_path(work: Path, ref: ArtifactRef) -> Path:
    """Return the path of the lock of one fingerprint, beside its work directory."""
    return work / f"{ref.name}.lock"


def work_directory(work: Path, ref: ArtifactRef) -> Path:
    """Return the directory in which the job of one fingerprint runs and is resumed."""
    return work / ref.name


def home_id(home: Path) -> str:
    """Return the id of `home`; two processes have the same id only if its locks exclude each other.

    Makes the directory if there is none. 32 hex digits. Raises StageError if it cannot be made.
    """
    with writing(home, StageError):
        home.mkdir(parents=True, exist_ok=True)
        status = home.stat()
    # A copied home has another inode, and a home on a network disk is seen from another kernel.
    # Neither shares flock with this one, so neither may have the same id. Without a boot id (macOS)
    # the time at which the directory was made distinguishes two machines of one name.
    made = getattr(status, "st_birthtime", 0)
    parts = (boot_id(), status.st_dev, status.st_ino, made)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def hold(path: Path, on_wait: Callable[[Owner | None], None]) -> Generator[None]:
    """Hold the lock at `path` while the block runs; wait while another process has it.

    `on_wait` is called with the owner at each try, and may raise; None means an owner that has not
    written its note yet. A caller that waited must look again for what it needs: the owner before
    may have made it. Raises StageError if the lock file cannot be written.
    """
    with _open(path) as file:
        while not try_flock(file):
            on_wait(_read_owner(path))
            time.sleep(POLL_SECONDS)
        with _owning(file, path):
            yield


@contextlib.contextmanager
def try_hold(path: Path, *, run: str | None = None) -> Generator[bool]:
    """Hold the lock at `path` while the block runs, if it is free. Yields whether it is held.

    Does not wait. `run` is noted. Raises StageError if the lock file cannot be written.
    """
    with _open(path) as file:
        if try_flock(file):
            with _owning(file, path, run=run):
                yield True
        else:
            yield False


def find_owner(path: Path) -> Owner | None:
    """Return the owner of the lock at `path`. None means free, or no whole note within a second."""
    try:
        with path.open(encoding="utf-8") as file:
            # Shared: two processes that look at once do not take each other for an owner.
            wait_until(
                lambda: try_flock(file, fcntl.LOCK_SH) or _read_owner(path) is not None,
                seconds=ASK_SECONDS,
            )
            return None if try_flock(file, fcntl.LOCK_SH) else _read_owner(path)
    except FileNotFoundError:
        pass
    return None


def _open(path: Path) -> IO[str]:
    with writing(path, StageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not "w", which would truncate the note of the process that holds the lock.
        return path.open("a+", encoding="utf-8")


@contextlib.contextmanager
def _owning(file: IO[str], path: Path, *, run: str | None = None) -> Generator[None]:
    """Keep a note of this process in the locked file. Closing the file releases the lock."""
    owner = Owner(pid=os.getpid(), host=socket.gethostname(), run=run)
    with writing(path, StageError):
        file.truncate(0)
        json.dump(asdict(owner), file)
        file.flush()
    try:
        yield
    finally:
        file.truncate(0)  # before the release, so that no later reader finds a former owner


def _read_owner(path: Path) -> Owner | None:
    """Return the note in a lock file. None means that it is not whole yet."""
    try:
        return Owner(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None
