"""Progress of long transfers, on stderr: a bar on a terminal, a line every 5 s elsewhere."""

import contextlib
import threading
import time
from collections.abc import Generator

from flows.cli.output import print_note, screen
from flows.render.text import duration, size
from infra.storage.base import OnBytes, ignore_bytes

QUIET_BYTES = 16_000_000  # a smaller transfer takes about a second and shows nothing
_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def show_bytes(total: int, *, what: str) -> Generator[OnBytes]:
    """Show how many of `total` bytes are transferred; yield the callback that counts them."""
    # A bar that appears and vanishes within a second is only flicker.
    if total < QUIET_BYTES:
        yield ignore_bytes
        return
    console = screen(stderr=True)
    if not console.is_terminal:
        yield _lines(total, what)
        return
    # Imported here: slow, and most commands show no bar.
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        refresh_per_second=4,
    ) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda count: bars.advance(bar, count)


def count_of(number: int, what: str) -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def describe_transfer(count: int, seconds: float) -> str:
    """Return a transfer's time and speed; "" for one too small to measure."""
    if count < QUIET_BYTES or seconds <= 0:
        return ""
    return f", in {duration(seconds)}, {size(round(count / seconds))}/s"


def _lines(total: int, what: str) -> OnBytes:
    """Return a callback that counts bytes and logs the progress every 5 s."""
    lock = threading.Lock()  # several transfer threads report their bytes
    began = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        with lock:
            done += count
            now = time.monotonic()
            if now - shown >= _SECONDS_BETWEEN_LINES:
                shown = now
                speed = size(round(done / (now - began)))
                print_note(f"{what}: {size(done)} of {size(total)}, {speed}/s")

    return advance
