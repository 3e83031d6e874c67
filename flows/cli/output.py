"""Printing for commands: results on stdout; errors, warnings and notes on stderr.

Colour is left out under NO_COLOR and where the output is not a terminal, so no text may depend on
its colour. Lines are written without rich, whose import takes as long as planning a run does.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flows.render.table import Table
from flows.render.text import ago, duration, one_line, size, visible
from infra.polling import POLL_SECONDS, SLOW_SECONDS
from infra.storage.base import OnBytes, ignore_bytes

if TYPE_CHECKING:
    from rich.console import Console

# Of the tones of cells: signs of `flows.plan.plan.STATES`, verdicts of `nanochat compare` and
# states of `nanochat doctor`. Only what will run or got worse is in colour.
_STYLES = {
    **{"=": "dim", "+": "cyan", "~": "yellow", ">": "cyan", "!": "magenta", "x": "red"},
    **{"better": "green", "worse": "yellow", "unclear": "dim"},
    **{"ok": "green", "warn": "yellow", "fail": "bold red"},
}
_CODES = {
    **{"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"},
    **{"magenta": "35", "cyan": "36"},
}
QUIET_BYTES = 16_000_000  # a smaller transfer takes about a second and shows nothing
_COLOURLESS = ("dumb", "unknown")  # values of TERM


def screen(*, stderr: bool = False) -> "Console":
    """Return a console for bars and displays: everything that is not lines of text."""
    from rich.console import Console  # takes as long to import as planning a run

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def open_closed_streams() -> None:
    """Point standard streams that the caller closed, as cron or `>&-` may, at /dev/null."""
    # In the order of their numbers: `open` takes the lowest free one, which would otherwise be that
    # of some later file, and get the output of a library or of a child process.
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def replace_unknown(stream: TextIO) -> None:
    """Have a stream take question marks for letters or bytes that its encoding lacks."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="replace")


def print_lines(items: Iterable[str | Table]) -> None:
    """Print tables that fit this terminal, and each text as one line.

    Newlines in a text are escaped, so that it cannot fake a line.
    """
    for item in items:
        if isinstance(item, Table):
            for line in item.lines(width=table_width(), paint=_paint):
                _write(sys.stdout, line)
        else:
            _write(sys.stdout, one_line(item))


def print_line(text: str, tone: str = "") -> None:
    """Print a text as `print_lines` does, in the colour of a tone."""
    _write(sys.stdout, _paint(one_line(text), tone))


def print_note(text: str) -> None:
    """Print one line on stderr: what the command is doing."""
    _write(sys.stderr, one_line(text))


def print_json(tree: Any) -> None:
    """Print `tree` for programs."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")


def print_result(tree: Callable[[], Any], lines: Iterable[str | Table], *, as_json: bool) -> None:
    """Print a command's result, for programs or for people; only what is printed is made."""
    if as_json:
        print_json(tree())
    else:
        print_lines(lines)


def print_error(message: str, *, hint: str | None) -> None:
    """Print `error:` and `hint:`, one line each, on stderr. None means there is no hint."""
    _print_labelled("error:", "bold red", message)
    if hint:
        _print_labelled("hint:", "bold cyan", hint)


def print_warning(message: str) -> None:
    """Print one `warning:` line on stderr; the command continues."""
    _print_labelled("warning:", "bold yellow", message)


def _print_labelled(label: str, style: str, text: str) -> None:
    message = visible(" ".join(text.split()))
    _write(sys.stderr, f"{styled(label, style, sys.stderr)} {message}")


def _paint(text: str, tone: str) -> str:
    return styled(text, _STYLES.get(tone, ""), sys.stdout)


def styled(text: str, style: str, stream: TextIO) -> str:
    """Return `text` with the codes of a style, such as "bold red", where `stream` shows colour."""
    if not style or os.environ.get("NO_COLOR") or os.environ.get("TERM") in _COLOURLESS:
        return text
    if not (os.environ.get("FORCE_COLOR") or stream.isatty()):
        return text
    codes = ";".join(_CODES[name] for name in style.split())
    return f"\x1b[{codes}m{text}\x1b[0m"


def password_line(home: Path) -> str | None:
    """Return the line with the password that Prefect's pages ask for; None for a shared server.

    Only a terminal gets the password: others may read a file that a shell writes, or the log of a
    CI job.
    """
    from infra.prefect.server import find_password, shared_server

    password = find_password(home)
    if password is None or shared_server(home) is not None:
        return None
    if not sys.stdout.isatty():
        password = "`nanochat up` prints it if its output is a terminal"
    return f"password     {password}"


def table_width() -> int | None:
    """Return the width of tables: COLUMNS, or the columns of this terminal.

    None if the output is not a terminal: a row stays one line.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def age(stamp: str) -> str:
    """Return how long ago a time was; --json has the time itself."""
    return ago(stamp, time.time())


def _write(stream: TextIO, line: str) -> None:
    stream.write(f"{line}\n")
    stream.flush()  # a reader of `nanochat status --follow` sees each line at once


def print_unread(unread: Sequence[str]) -> None:
    """Warn of skipped records. Each text has the record's key and what is wrong with it."""
    if unread := list(dict.fromkeys(unread)):
        print_warning(f"{count_of(len(unread), 'record')} cannot be read: {'; '.join(unread)}")


# Progress of long transfers: a line at the end of a terminal, a line every 5 s elsewhere.


@contextlib.contextmanager
def show_bytes(total: int, *, what: str) -> Generator[OnBytes]:
    """Show how many of `total` bytes are transferred; yield the callback that counts them."""
    # A line that appears and vanishes within a second is only flicker.
    if total < QUIET_BYTES:
        yield ignore_bytes
        return
    console = screen(stderr=True)
    if not console.is_terminal:
        yield _count_bytes(total, what, print_note, every=SLOW_SECONDS)
        return
    from rich.text import Text  # slow to import, and most commands show no progress

    # Not `str`, in which a status would read markup.
    with console.status(Text(one_line(what))) as status:
        yield _count_bytes(
            total, what, lambda text: status.update(Text(one_line(text))), every=POLL_SECONDS
        )


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """Print how to resume a transfer that is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        print_note("interrupted; the same command resumes from here")
        raise


def count_of(number: int, what: str) -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def describe_transfer(count: int, seconds: float) -> str:
    """Return a transfer's time and speed; "" for one too small to measure."""
    if count < QUIET_BYTES or seconds <= 0:
        return ""
    return f", in {duration(seconds)}, {size(round(count / seconds))}/s"


def _count_bytes(total: int, what: str, show: Callable[[str], None], *, every: float) -> OnBytes:
    """Return a callback that counts bytes, and shows how far they are `every` so many seconds."""
    lock = threading.Lock()  # several transfer threads report their bytes
    began = shown = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, shown
        with lock:
            done += count
            now = time.monotonic()
            if now - shown >= every:
                shown, speed = now, done / (now - began)
                left = f", {duration((total - done) / speed)} left" if speed > 0 else ""
                show(f"{what}: {size(done)} of {size(total)}, {size(round(speed))}/s{left}")

    return advance
