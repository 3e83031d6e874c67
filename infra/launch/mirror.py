"""Upload each new checkpoint of a running job in the background.

If uploads are slower than saves, only the newest checkpoint is sent and those in between are
skipped. Once the job is to end soon, an upload is given up for that of a newer checkpoint: the time
until a scheduler kills this process is for what is saved last.
"""

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias

from infra.launch.background import poll
from infra.polling import ASK_SECONDS
from nanochat_core.errors import NanochatError, StageError

_COMMIT = "COMMIT.json"  # written last: a directory without it is not a checkpoint yet


Send: TypeAlias = Callable[[Path, Callable[[], None]], None]


class Superseded(StageError):
    """An upload that was given up: a newer checkpoint goes first."""


@contextlib.contextmanager
def mirror(
    checkpoints: Path,
    send: Send,
    *,
    on_error: Callable[[NanochatError], None],
    skip: Callable[[Path], bool] = lambda directory: False,
    is_stopping: Callable[[], bool] = lambda: False,
    every: float = ASK_SECONDS,
) -> Generator[None]:
    """While the block runs, call `send` with a copy of each newest checkpoint directory.

    `send` calls its second argument before it begins and after every block of bytes. That raises
    Superseded if this upload is to be given up: when the block has ended, or `is_stopping` says
    that it soon will, and a newer checkpoint is there or being saved.

    Checkpoints that exist at the beginning count as sent, even if the job finds the newest of them
    damaged and sets it aside. However the block ends, the last checkpoint that it left is sent
    before this returns. A checkpoint for which `skip` returns True is not sent; `skip` is called at
    each look. An error, in `skip` too, is passed to `on_error` and the send is retried at the next
    look; a job never fails because its mirror does.
    """
    sent: set[tuple[Path, int | None]] = {
        (directory, time) for directory in _saves(checkpoints) if (time := _commit_time(directory))
    }
    ended = threading.Event()

    def check(directory: Path) -> None:
        if ended.is_set():
            is_wanted = _newest(checkpoints, _commit_time) == directory
        else:
            is_wanted = _newest(checkpoints, Path.exists) == directory or not is_stopping()
        if not is_wanted:
            raise Superseded(f"{directory} is not sent")

    def look() -> None:
        with reporting_errors(checkpoints, on_error):
            directory = _newest(checkpoints, _commit_time)
            if directory is None or (directory, _commit_time(directory)) in sent or skip(directory):
                return
            with _held(directory) as copy:
                send(copy, functools.partial(check, directory))
                sent.add((directory, _commit_time(copy)))

    with poll(look, every=every):
        try:
            yield
        finally:
            ended.set()


@contextlib.contextmanager
def reporting_errors(
    checkpoints: Path, on_error: Callable[[NanochatError], None]
) -> Generator[None]:
    """Pass errors in the block to `on_error` instead of raising them; an upload may be given up."""
    try:
        yield
    except Superseded:
        pass
    except NanochatError as error:
        on_error(error)
    # Whatever a damaged checkpoint may raise: an exception would end the thread.
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
        on_error(StageError(f"{checkpoints} cannot be read: {why.lower()}"))


def _saves(checkpoints: Path) -> list[Path]:
    """Return the directories of saves, committed or not, the highest step first."""
    return sorted(checkpoints.glob("step-*"), reverse=True)


def _newest(checkpoints: Path, accepts: Callable[[Path], object]) -> Path | None:
    return next(filter(accepts, _saves(checkpoints)), None)


def _commit_time(directory: Path) -> int | None:
    """Return when a checkpoint was committed (ns); None if it is not."""
    # It distinguishes a step that was saved again from the one that was sent.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (directory / _COMMIT).stat().st_mtime_ns
    return None


@contextlib.contextmanager
def _held(directory: Path) -> Generator[Path]:
    """Yield a copy of a checkpoint. Raises Superseded if the job drops it before it is linked."""
    # Hard links: the job deletes old checkpoints while they are sent, and its names only.
    copy = directory.with_name(f".mirror-{directory.name}")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        _hold(directory, copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _hold(directory: Path, copy: Path) -> None:
    copy.mkdir()
    try:
        for path in directory.iterdir():
            try:
                os.link(path, copy / path.name)
            except OSError:  # a file system without hard links
                shutil.copy2(path, copy / path.name)  # with its time
    except FileNotFoundError as error:
        raise Superseded(f"{directory} was dropped, so a newer one exists") from error
