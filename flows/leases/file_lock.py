"""File locks of one machine (flock): one process builds a fingerprint or fetches into a directory.

The kernel releases a lock when its process ends, however it ends. Who builds, on this machine or on
another, is in the lease (flows/leases/lease.py).
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.identity.ref import ArtifactRef
from infra.polling import POLL_SECONDS
from infra.storage.files import try_flock, writing
from nanochat_core.errors import StageError

_SCRATCH, _LOCK = "scratch-", "lock"  # prefix of scratch directories, and the lock in each


def lock_path(work: Path, ref: ArtifactRef) -> Path:
    """Return the path of the lock of one fingerprint, next to its work directory."""
    return work / f"{ref.name}.lock"


def work_directory(work: Path, ref: ArtifactRef) -> Path:
    """Return the directory in which the job of one fingerprint runs and is resumed."""
    return work / ref.name


@contextlib.contextmanager
def hold(path: Path, on_wait: Callable[[], None]) -> Generator[None]:
    """Hold the lock at `path` while the block runs; wait while another process has it.

    `on_wait` is called at each try, and may raise. A caller that waited must look again for what it
    needs: the owner before may have made it. Raises StageError if the lock file cannot be written.
    """
    while True:
        with try_hold(path) as is_held:
            if is_held:
                yield
                return
        on_wait()
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def try_hold(path: Path) -> Generator[bool]:
    """Hold the lock at `path` while the block runs, if it is free. Yields whether it is held.

    Does not wait. Raises StageError if the lock file cannot be written.
    """
    with writing(path, StageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:  # closing it releases the lock
        yield try_flock(file)


@contextlib.contextmanager
def scratch_directory(home: Path) -> Generator[Path]:
    """Yield a new directory below `home`. Directories of processes that were killed are removed."""
    with contextlib.ExitStack() as mine:
        # Under a lock of the home: one that another process has just made is not locked yet.
        with hold(home / "scratch.lock", lambda: None):
            for path in home.glob(f"{_SCRATCH}*"):
                if not is_held(path / _LOCK):
                    shutil.rmtree(path, ignore_errors=True)
            scratch = Path(mine.enter_context(TemporaryDirectory(prefix=_SCRATCH, dir=home)))
            mine.enter_context(try_hold(scratch / _LOCK))
        yield scratch


def is_held(path: Path) -> bool:
    """Return whether a process of this machine holds the lock at `path`."""
    with contextlib.suppress(OSError), path.open() as file:
        return not try_flock(file)
    return False
