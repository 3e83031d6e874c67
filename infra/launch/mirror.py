"""Sends each new checkpoint of a running job somewhere safe, in the background.

The newest counts: when sending is slower than saving, those in between are skipped. A checkpoint is
held by hard links while it is sent, because the job drops old ones in its own time.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from nanochat_core.errors import NanochatError

_SECONDS_BETWEEN_LOOKS = 1.0
_COMMIT = "COMMIT.json"  # written last: a directory without it is no checkpoint yet


@contextlib.contextmanager
def mirror(
    checkpoints: Path,
    send: Callable[[Path], None],
    *,
    on_error: Callable[[NanochatError], None],
    every: float = _SECONDS_BETWEEN_LOOKS,
) -> Generator[None]:
    """While the block runs, call `send` with a copy of each newest checkpoint directory.

    What is there at the beginning counts as sent. However the block ends, the last checkpoint that
    it left is sent before this returns. A NanochatError of `send` is told and tried again with the
    next look; a job never fails because its mirror does.
    """
    ended = threading.Event()
    sent = _newest(checkpoints)

    def look() -> None:
        nonlocal sent
        newest = _newest(checkpoints)
        if newest is not None and newest != sent:
            try:
                with _held(newest[0]) as copy:
                    send(copy)
            except FileNotFoundError:
                return  # dropped before it was held; a newer one is there
            except NanochatError as error:
                on_error(error)
                return
            sent = newest

    def watch() -> None:
        while not ended.wait(every):
            look()

    thread = threading.Thread(target=watch, name="mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def _newest(checkpoints: Path) -> tuple[Path, int] | None:
    """The checkpoint of the highest step, with the time at which it was committed."""
    for directory in sorted(checkpoints.glob("step-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return directory, (directory / _COMMIT).stat().st_mtime_ns
    return None


@contextlib.contextmanager
def _held(directory: Path) -> Generator[Path]:
    """Another directory with the same files, which stay when the job drops its own names."""
    copy = directory.with_name(f".mirror-{directory.name}")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(directory, copy, copy_function=os.link)
        yield copy
    except shutil.Error as error:  # names that vanished while they were linked
        raise FileNotFoundError(str(error)) from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)
