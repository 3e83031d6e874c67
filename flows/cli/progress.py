"""How a long transfer is shown: a bar on a terminal, a line now and then elsewhere. On stderr."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator

from flows.cli.output import screen
from infra.storage.base import OnBytes, ignore_bytes

QUIET_BYTES = 16_000_000  # less is over before anybody wonders
_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def show_bytes(total: int, *, what: str) -> Generator[OnBytes]:
    """Show how many of `total` bytes went over; the block is given what must be told of them."""
    if total < QUIET_BYTES:
        yield ignore_bytes
        return
    console = screen(stderr=True)
    if not console.is_terminal:
        yield _lines(console.print, total, what)
        return
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
    """A number of things: 1 file, 2 files."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def describe_transfer(count: int, seconds: float) -> str:
    """How long a transfer took and how fast it was; empty for one too small to tell."""
    if count < QUIET_BYTES or seconds <= 0:
        return ""
    return f", in {seconds:.1f} s, {count / seconds / 1e6:.1f} MB/s"


def _lines(say: Callable[[str], None], total: int, what: str) -> OnBytes:
    """Says every few seconds how far it is."""
    lock = threading.Lock()
    began = shown = time.monotonic()
    done = 0

    def tell(count: int) -> None:
        nonlocal done, shown
        with lock:
            done += count
            now = time.monotonic()
            if now - shown >= _SECONDS_BETWEEN_LINES:
                shown = now
                speed = done / (now - began) / 1e6
                say(f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {speed:.1f} MB/s")

    return tell
