"""Start background processes with a log; rotate logs, and read their last line."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

MAX_BYTES = 20_000_000  # then the log is copied to NAME.1, and the copy before it is dropped
# Lines that Prefect's commands print after a traceback.
_EMPTY = (
    *("", "An exception occurred.", "Server stopped!"),
    "ERROR:    Application startup failed. Exiting.",
)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to `log`, in a session of its own.

    So Ctrl-C reaches the caller alone. Raises OSError if it cannot be started.
    """
    rotate(log)
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def rotate(log: Path) -> None:
    """Copy a long log to NAME.1 and truncate it; processes may be appending to it.

    What they write between the two is lost.
    """
    with contextlib.suppress(OSError):  # no log yet, or a full disk: the next call retries
        if log.stat().st_size > MAX_BYTES:
            # A rename would leave the process writing to NAME.1: it has the file open.
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def last_line(log: Path) -> str:
    """Return the last line that says why a process ended; empty if there is none."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line not in _EMPTY), "")
    return ""
