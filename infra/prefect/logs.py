"""Rotate the logs of background processes, and read their last line."""

import contextlib
import os
import shutil
from pathlib import Path

MOST_BYTES = 20_000_000  # then the log becomes NAME.1, and the one before it is dropped


def keep_short(log: Path) -> None:
    """Rename a long log to NAME.1. Call it before a process is started that appends to it."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > MOST_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


def cut_short(log: Path) -> None:
    """Copy a long log to NAME.1 and truncate it, while processes append to it.

    What they write between the two may be lost.
    """
    with contextlib.suppress(OSError):  # a full disk: the next call retries
        if log.stat().st_size > MOST_BYTES:
            # A rename would leave the process writing to NAME.1: it has the file open.
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def last_line(log: Path) -> str:
    """Return the last line that is not blank; empty if there is none."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")
    return ""
