"""Run model-written Python in a sandbox, or not at all if this machine has none.

The program has no network, no environment variables and no other processes. It can read files only
in /usr and of the interpreter, and write only to 32 MB of its own. `protections` reports the
backend of this machine, which is tested from inside a sandbox before it is used. Limits on CPU
time, memory, threads, files and output, and a wall-clock deadline, end the program. One run is one
process (two with a `Check`), so that the memory limit covers all that it does.

How far a verdict can be trusted: exit codes and printed text prove nothing, so "passed" means that
a nonce was returned. With a `Check`, tester and program are two sandboxes that exchange only copies
of plain values: the program has neither the tests nor the nonce, and can only answer calls. Without
one, the tests are part of the program and run in its process. The nonce is read after the last
statement, but a malicious program can find its pipe, or replace what the tests compare with: such a
verdict is only for programs that do not try to deceive.
"""

import functools
import json
import os
import socket
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from tasks.base import TaskError
from tasks.sandbox.backends import Kind, Way, programs, ways
from tasks.sandbox.process import Check, Verdict, run_in

# The sandbox's guarantees. Model-written code runs only if all of them hold.
PROTECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "user": "it is not root",
        "files": "it reads no file of the host but those of /usr and the interpreter",
        "disk": "it neither writes nor truncates a file of the host",
        "network": "it reaches no network, not even the host's own, and no socket of the host",
        "processes": "it starts no process, and neither signals nor asks about others",
        "calls": "parts of the kernel that nothing splits are closed to it, such as keys and bpf",
        "limits": "it has so much time, memory and open files",
    }
)

# Attempts, harmlessly, what each protection forbids, and prints which attempts failed. SCRATCH is
# a file in a folder that the program may read; signals are number 0, which is never delivered.
_PROBE = """
import ctypes, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(attempt, *args):
    try:
        return attempt(*args) == -1
    except OSError:
        return True
def connect():
    with socket.socket() as s:
        s.connect(("127.0.0.1", PORT))
def name():
    for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        s.bind("")
def make(folder):
    os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
def truncate():
    os.close(os.open(SCRATCH, os.O_RDONLY | os.O_TRUNC))
def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
def share():
    segment = libc.shmget(0, 4096, 0o600)
    libc.shmctl(segment, 0, None)
    return segment
arm = os.uname().machine == "aarch64"
of_host = ("/etc/passwd", "/etc/hosts", "/proc/self/status", "/proc/sys/kernel/hostname")
other = PARENT if PARENT != os.getpid() else 1  # numbers begin anew in a namespace
print(json.dumps({
    "user": os.getuid() != 0 and os.geteuid() != 0,
    "files": all(refused(os.open, path, os.O_RDONLY) for path in of_host),
    "disk": all(refused(make, folder) for folder in ("/", "/var/tmp", "/dev/shm", "/usr", FOLDER))
        and refused(truncate) and refused(os.truncate, SCRATCH, 0),
    "network": refused(connect) and refused(name),
    "processes": refused(fork) and refused(os.kill, other, 0) and refused(os.getpgid, other),
    "calls": refused(libc.syscall, 219 if arm else 250, 0, -3, 1) and refused(share)
        and refused(libc.unshare, 0),
    "limits": resource.getrlimit(resource.RLIMIT_AS)[1] == MEMORY,
}))
"""
_PROBE_SECONDS, _PROBE_MEMORY_MB = 20.0, 512


@dataclass(frozen=True, kw_only=True)
class Protections:
    """The backend that sandboxes model-written code on this machine, as tested."""

    kind: Kind  # it has all of `PROTECTIONS`
    why: tuple[str, ...]  # why each stronger kind is unavailable


def protections() -> Protections:
    """Return this machine's backend. Raises TaskError if none has all `PROTECTIONS`."""
    return _choose(os.geteuid(), tuple(programs().items()))[1]


def run_untrusted(
    program: str,
    *,
    check: Check | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
    stop: threading.Event | None = None,
) -> Verdict:
    """Run a program, and its check in a second sandbox; see the module on what "passed" means.

    `seconds` limits everything together, `memory_mb` the address space of each of the two. The
    program gets an empty standard input and the `__name__` "__main__". Setting `stop` ends the run
    within 50 ms.

    Raises TaskError if a protection is missing; nothing has run then.
    """
    way = _choose(os.geteuid(), tuple(programs().items()))[0]
    return run_in(way, program, check=check, seconds=seconds, memory_mb=memory_mb, stop=stop)


@functools.cache
def _choose(_: int, found: tuple[tuple[str, str | None], ...]) -> tuple[Way, Protections]:
    """Return the first backend that has all protections; cached per user and found programs."""
    why: list[str] = []
    for way in ways(dict(found)):
        fault = way if isinstance(way, str) else _try_out(way)
        if not fault:
            assert isinstance(way, Way)
            return way, Protections(kind=way.kind, why=tuple(why))
        why.append(fault)
    raise TaskError(
        f"model-written code does not run here: {'; '.join(why)} (install bubblewrap and allow "
        "user namespaces, or use Linux 5.13 or newer with Landlock)"
    )


def _try_out(way: Way) -> str:
    """Return what a backend fails to prevent, tested by a program inside, or "" if nothing."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
    ):
        scratch = Path(folder, "scratch")
        scratch.write_text("of the host")
        scratch.chmod(0o666)  # for the user that root switches to
        os.chmod(folder, 0o755)
        facts = {
            "PORT": server.getsockname()[1],
            "PARENT": os.getpid(),
            # Often owned by the user, so writable without protection.
            "FOLDER": os.path.dirname(__file__),
            "SCRATCH": str(scratch),
            "MEMORY": _PROBE_MEMORY_MB << 20,
        }
        given = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
        verdict = run_in(
            replace(way, readable=(*way.readable, folder)),
            given + _PROBE,
            check=None,
            seconds=_PROBE_SECONDS,
            memory_mb=_PROBE_MEMORY_MB,
            stop=None,
        )
    if not verdict.passed:
        said = (verdict.output.strip().splitlines() or [verdict.reason])[-1]
        return f"{way.kind} does not start: {said}"
    refused = json.loads(verdict.output)
    lacking = ", ".join(sorted(name for name in PROTECTIONS if not refused[name]))
    return lacking and f"{way.kind} does not hold {lacking}"
