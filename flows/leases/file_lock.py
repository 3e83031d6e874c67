"""File locks of this machine: one process of it builds a fingerprint, or fetches into a directory.

The kernel frees a lock when its process ends, however it ends, so whoever holds the lock of a
fingerprint knows that an earlier owner in the same home is dead. Between machines there are leases
(flows/leases/lease.py). The lock file also tells a waiter who is building.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from flows.identity.fingerprint import short
from nanochat_core.errors import StageError
from nanochat_core.job import sync_directory
from nanochat_core.runtime.process_start import boot_id

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


def home_id(home: Path) -> str:
    """What the file locks of `home` are known by: only processes that they keep apart share it.

    Part of it is a random id, made once. The file's own place on its disk and the running kernel
    are part of it too, because the locks of a copied home, or of one that another machine reaches
    over a network, are other locks. Raises StageError when it cannot be made.
    """
    if (found := find_home_id(home)) is None:
        try:
            _make_id(home / "id")
        except OSError as error:
            raise _not_writable(home / "id", error) from error
        found = find_home_id(home)
    assert found is not None, home
    return found


def find_home_id(home: Path) -> str | None:
    """The id of `home`, or None when nothing was built in it yet."""
    try:
        with (home / "id").open(encoding="ascii") as file:
            random, status = file.read().strip(), os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_writable(home / "id", error) from error
    parts = (random, boot_id(), status.st_dev, status.st_ino)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@contextlib.contextmanager
def hold(path: Path, on_wait: Callable[[Owner | None], None]) -> Generator[None]:
    """Hold the lock at `path`; while another process has it, wait.

    `on_wait` is called once for each owner that is waited for (None: it has not said who it is).
    Whoever waited looks again for what it needs: the other one may have made it. Raises StageError
    when the lock file cannot be written.
    """
    told: set[Owner | None] = set()
    with _open(path) as file:
        while not _try_lock(file, fcntl.LOCK_EX):
            owner = _read_owner(path)
            if owner not in told:
                told.add(owner)
                on_wait(owner)
            time.sleep(_SECONDS_BETWEEN_TRIES)
        with _owning(file, path):
            yield


@contextlib.contextmanager
def try_hold(path: Path) -> Generator[bool]:
    """Hold the lock at `path` if it is free; whether it is held.

    Raises StageError when the lock file cannot be written.
    """
    with _open(path) as file:
        if _try_lock(file, fcntl.LOCK_EX):
            with _owning(file, path):
                yield True
        else:
            yield False


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


def _open(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise _not_writable(path, error) from error


@contextlib.contextmanager
def _owning(file: IO[str], path: Path) -> Generator[None]:
    """Say in the locked file who holds it. Closing the file gives the lock back."""
    try:
        _write_owner(file)
    except OSError as error:
        raise _not_writable(path, error) from error
    try:
        yield
    finally:
        file.truncate(0)


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


def _make_id(path: Path) -> None:
    """Write a new id, whole, unless another process was quicker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".id.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="ascii") as file:
            file.write(f"{uuid.uuid4().hex}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _not_writable(path: Path, error: OSError) -> StageError:
    return StageError(
        f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
        hint="check that NANOCHAT_HOME is a directory of yours on a disk with free space",
    )
