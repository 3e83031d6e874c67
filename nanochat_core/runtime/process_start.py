"""Identify a process beyond its number: numbers are reused, and wall clocks are set.

A record that names a process holds its number and `start_of` it. On Linux that is the boot, the
PID namespace and the start in clock ticks since boot, none of which moves when the clock is set.
Elsewhere (macOS) it is the start in unix seconds that the kernel stored when the process began.
"""

import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import psutil

FORMAT = 1  # of a file that names a process
ENDED = ("Z", "X")  # states of a process that has ended and was not waited for yet
_STATE, _START_TICKS = 0, 19  # fields 3 and 22 of /proc/PID/stat, counted after the command's name


@dataclass(frozen=True, kw_only=True)
class ProcessRef:
    """One process, as a record on disk names it."""

    pid: int
    start: str  # see `start_of`

    def __str__(self) -> str:
        return f"process {self.pid}"

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """Read a reference from `path`; None if there is none, not whole or of another format."""
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            return cls(**tree) if tree.pop("format") == FORMAT else None
        except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, file: IO[str]) -> None:
        """Replace what a file opened for appending holds."""
        file.truncate(0)
        json.dump({"format": FORMAT, **asdict(self)}, file)
        file.flush()


def this_process() -> ProcessRef:
    """Return the reference to the calling process."""
    pid = os.getpid()
    start = start_of(pid)
    assert start is not None, pid
    return ProcessRef(pid=pid, start=start)


def start_of(pid: int) -> str | None:
    """Return what distinguishes live process `pid` from every other one with that number.

    None means that no such process lives here; a zombie does not live.
    """
    if sys.platform != "linux":
        return _start_by_psutil(pid)
    stat = read_stat(pid)
    if stat is None or stat.state in ENDED:
        return None
    # Ticks count from boot and pids per namespace, so both are part of the identity.
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')} {stat.start}"


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process."""

    state: str  # one letter
    start: int  # clock ticks from the boot


def read_stat(pid: int) -> Stat | None:
    """Return what /proc shows of process `pid`. None means nothing, or that there is no /proc."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = line.rpartition(b")")[2].split()  # a command's name may hold spaces and parentheses
    return Stat(fields[_STATE].decode(), int(fields[_START_TICKS]))


def find_process(pid: int, start: str) -> "psutil.Process | None":
    """Return the live process that was recorded as `pid` and `start`, or None if it ended."""
    import psutil

    try:
        # Created before the check: from then on psutil notices if the number is reused.
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
    return process if start_of(pid) == start else None


def kill(process: ProcessRef) -> bool:
    """Send SIGKILL to exactly this process; return whether it was alive.

    Raises PermissionError if it belongs to another user.
    """
    if sys.platform != "linux":
        if is_alive := start_of(process.pid) == process.start:
            os.kill(process.pid, signal.SIGKILL)
        return is_alive
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:  # the descriptor stays with the process, so the number cannot be reused after the check
        if start_of(process.pid) != process.start:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def boot_id() -> str | None:
    """Return the id of the running kernel's boot, or None where there is none (macOS)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def pid_namespace() -> str | None:
    """Return the id of this process's PID namespace; None if /proc shows another or is missing."""
    try:
        is_own = os.readlink("/proc/self") == str(os.getpid())
        return os.readlink("/proc/self/ns/pid") if is_own else None
    except OSError:
        return None


def _start_by_psutil(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        is_dead = process.status() == psutil.STATUS_ZOMBIE
        return None if is_dead else repr(process.create_time())
    except psutil.NoSuchProcess:
        return None
