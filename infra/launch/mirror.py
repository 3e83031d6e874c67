"""Sends each new checkpoint of a running job somewhere safe, in the background.

The newest counts: when sending is slower than saving, those in between are skipped. A checkpoint is
held by hard links (or copied, where there are none) while it is sent, because the job drops old
ones in its own time.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from infra.launch.background import poll
from nanochat_core.errors import NanochatError, StageError

_SECONDS_BETWEEN_LOOKS = 1.0
_COMMIT = "COMMIT.json"  # written last: a directory without it is no checkpoint yet


@contextlib.contextmanager
def mirror(
    checkpoints: Path,
    send: Callable[[Path], None],
    *,
    on_error: Callable[[NanochatError], None],
    skip: Callable[[Path], bool] = lambda directory: False,
    every: float = _SECONDS_BETWEEN_LOOKS,
) -> Generator[None]:
    """While the block runs, call `send` with a copy of each newest checkpoint directory.

    What is there at the beginning counts as sent, also where the job finds the newest of it damaged
    and sets it aside. However the block ends, the last checkpoint that it left is sent before this
    returns. A checkpoint for which `skip` returns True is passed over; it is asked at each look.
    What goes wrong, in `skip` too, is reported and tried again with the next look; a job never
    fails because its mirror does.
    """
    sent = set(_committed(checkpoints))

    def look() -> None:
        try:
            newest = next(_committed(checkpoints), None)
            if newest is None or newest in sent or skip(newest[0]):
                return
            with _held(newest[0]) as copy:
                if copy is None:
                    return  # dropped meanwhile; a newer one is there
                send(copy)
        except NanochatError as error:
            on_error(error)
        except (OSError, ValueError, LookupError, TypeError) as error:  # an error ends the thread
            why = (error.strerror if isinstance(error, OSError) else None) or repr(error)
            on_error(StageError(f"{checkpoints} cannot be read: {why.lower()}"))
        else:
            sent.add(newest)

    with poll(look, every=every):
        yield


def _committed(checkpoints: Path) -> Iterator[tuple[Path, int]]:
    """The checkpoints, the highest step first, with the times at which they were committed."""
    for directory in sorted(checkpoints.glob("step-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield directory, (directory / _COMMIT).stat().st_mtime_ns


@contextlib.contextmanager
def _held(directory: Path) -> Generator[Path | None]:
    """Another directory with the same files, which stay when the job drops its own names.

    None when one of them vanished before it was held.
    """
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
