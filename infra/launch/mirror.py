"""Upload each new checkpoint of a running job in the background.

If uploads are slower than saves, only the newest checkpoint is sent and those in between are
skipped. Once the job has ended, an upload of an older checkpoint is given up for the newest: the
time until a scheduler kills this process is for what was saved last.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from infra.launch.background import poll
from nanochat_core.errors import NanochatError, StageError

_SECONDS_BETWEEN_LOOKS = 1.0
_COMMIT = "COMMIT.json"  # written last: a directory without it is not a checkpoint yet


class Superseded(StageError):
    """An upload that was given up because a newer checkpoint is to be sent."""


@contextlib.contextmanager
def mirror(
    checkpoints: Path,
    send: Callable[[Path, Callable[[], None]], None],
    *,
    on_error: Callable[[NanochatError], None],
    skip: Callable[[Path], bool] = lambda directory: False,
    every: float = _SECONDS_BETWEEN_LOOKS,
) -> Generator[None]:
    """While the block runs, call `send` with a copy of each newest checkpoint directory.

    `send` calls its second argument often while it uploads: that raises Superseded once the block
    has ended and left a newer checkpoint.

    Checkpoints that exist at the beginning count as sent, even if the job finds the newest of them
    damaged and sets it aside. However the block ends, the last checkpoint that it left is sent
    before this returns. A checkpoint for which `skip` returns True is not sent; `skip` is called at
    each look. An error, in `skip` too, is passed to `on_error` and the send is retried at the next
    look; a job never fails because its mirror does.
    """
    sent = set(_committed(checkpoints))
    ended = threading.Event()

    def look() -> None:
        newest = None

        def check() -> None:
            if ended.is_set() and next(_committed(checkpoints), None) != newest:
                raise Superseded(f"{newest} is not the newest checkpoint")

        try:
            newest = next(_committed(checkpoints), None)
            if newest is None or newest in sent or skip(newest[0]):
                return
            with _held(newest[0]) as copy:
                if copy is None:
                    return  # dropped meanwhile, so a newer one exists
                send(copy, check)
        except Superseded:
            pass
        except NanochatError as error:
            on_error(error)
        # Whatever a damaged checkpoint may raise: an exception would end the thread.
        except (OSError, ValueError, LookupError, TypeError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
            on_error(StageError(f"{checkpoints} cannot be read: {why.lower()}"))
        else:
            sent.add(newest)

    with poll(look, every=every):
        try:
            yield
        finally:
            ended.set()


def _committed(checkpoints: Path) -> Iterator[tuple[Path, int]]:
    """Yield the checkpoints, the highest step first, with the times of their commit (ns)."""
    # The time distinguishes a step that was saved again from the one that was sent.
    for directory in sorted(checkpoints.glob("step-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield directory, (directory / _COMMIT).stat().st_mtime_ns


@contextlib.contextmanager
def _held(directory: Path) -> Generator[Path | None]:
    """Yield a copy of a checkpoint; None if one of its files vanished before it was linked."""
    # Hard links: the job deletes old checkpoints while they are sent, and its names only.
    copy = directory.with_name(f".mirror-{directory.name}")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        yield copy if _hold(directory, copy) else None
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _hold(directory: Path, copy: Path) -> bool:
    copy.mkdir()
    try:
        for path in [path for path in directory.rglob("*") if path.is_file()]:
            target = copy / path.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, target)
    except FileNotFoundError:
        return False
    return True


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
