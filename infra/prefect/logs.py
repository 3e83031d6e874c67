"""Logs of background processes: appended to, put aside when long, quoted from."""

import contextlib
import os
import shutil
from pathlib import Path

MOST_BYTES = 20_000_000  # then the log becomes NAME.1, and the one before it is dropped


def keep_short(log: Path) -> None:
    """Put a long log aside. Called before a process is started that appends to it."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MOST_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


def cut_short(log: Path) -> None:
    """Copy a long log aside and begin it anew, for programs that have it open to append to.

    What they write in that moment may be lost.
    """
    with contextlib.suppress(OSError):  # a full disk: later
        if log.stat().st_size > MOST_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def last_line(log: Path) -> str:
    """The last line that says something; empty when there is none."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")
    return ""
