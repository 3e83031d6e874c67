"""Start processes of a home's stack with a log, and read what it says last."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_MAX_LOG = 20_000_000  # bytes; then a log is renamed when its process starts again
_MAX_READ = 65_536  # bytes of its end
# What Prefect's commands print after the reason of their end.
_NOISE = (
    *("An exception occurred.", "Server stopped!", "SAWarning: The garbage collector"),
    *("Application startup failed. Exiting.", "Application shutdown failed. Exiting."),
)


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command whose output is appended to `log`, in a session of its own.

    So Ctrl-C reaches the caller alone. `inherited` are file descriptors that it gets. A log of more
    than 20 MB is renamed to NAME.1 before. Raises OSError if the command cannot be started.
    """
    if log.exists() and log.stat().st_size > _MAX_LOG:
        shutil.move(log, f"{log}.1")
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            # Not the caller's: its prefect.toml or .env would configure Prefect.
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            pass_fds=inherited,
        )


def last_line(log: Path) -> str:
    """Return the last line that says why a process ended; empty if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_READ))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        said = (line for line in reversed(lines) if line and not any(n in line for n in _NOISE))
        return next(said, "")
    return ""
