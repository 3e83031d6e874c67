"""Name a process of any machine in a record, and find out whether it is known to be dead."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from nanochat_core.runtime.process_start import ENDED, boot_id, pid_namespace, read_stat

FIRST_NAMESPACE = "pid:[4026531836]"  # of the kernel itself, the same on all machines


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of one machine. None means that its system names no such thing, as macOS."""

    host: str
    pid: int
    machine: str | None = None  # id of the installation: two machines may have one host name
    boot: str | None = None  # id of the kernel's boot; containers of one machine share it
    namespace: str | None = None  # of pids: processes of two namespaces do not see each other
    start: int | None = None  # clock ticks from the boot

    @staticmethod
    def this() -> "Process":
        """Return the calling process."""
        pid = os.getpid()
        stat = read_stat(pid)
        return Process(
            host=socket.gethostname(),
            pid=pid,
            machine=_read(Path("/etc/machine-id")),
            boot=boot_id(),
            namespace=pid_namespace(),
            start=stat and stat.start,
        )

    def is_dead(self) -> bool:
        """Return True if the process is known to have ended; False may mean that it is unknown."""
        me = self.this()
        if self.boot is None or me.boot is None:
            return False
        if self.boot != me.boot:  # of this machine before it was started again, or of another
            # Not in a container: images may have one machine id, and machines give their containers
            # one host name.
            is_here = (self.host, self.machine) == (me.host, me.machine)
            is_bare = self.namespace == me.namespace == FIRST_NAMESPACE
            return is_here and is_bare and me.machine is not None
        return me.namespace is not None and self.namespace == me.namespace and self._has_ended()

    def _has_ended(self) -> bool:
        try:
            os.kill(self.pid, 0)  # sends nothing
        except ProcessLookupError:
            return True
        except PermissionError:  # it belongs to another user
            pass
        # /proc may hide processes of other users (hidepid): a missing file proves nothing.
        stat = read_stat(self.pid)
        return stat is not None and (stat.state in ENDED or stat.start != self.start)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None
