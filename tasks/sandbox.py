"""Runs Python that a model wrote, where it can reach nothing, or not at all.

The program has no network, no environment and no other process, sees no file but those of /usr and
the interpreter, and writes none but in 32 MB of its own. `protections` says what holds it on this
machine: each is tried out from within a sandbox before it is relied on. Limits on CPU time, memory,
threads, files and output end what wants too much, a deadline by the wall clock ends the rest. One
run is one process (two with a `Check`), so that the limit on memory is one for all that it does.

What a verdict is worth. An exit code proves nothing and printed text neither: passed means that a
nonce came back. Given a `Check`, tester and program are two sandboxes between which only copies of
plain values pass. The program then holds neither the tests nor the nonce, so all it can do is
answer. Without one, tests are part of the program and run in its process. The nonce is read after
its last statement, but a program that sets out to can find the pipe that holds it, or replace what
the tests compare with: such a verdict is for programs that do not try to deceive.
"""

import functools
import json
import os
import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tasks.base import TaskError
from tasks.sandbox_runs import Check, Verdict, run_in
from tasks.sandbox_ways import Kind, Way, programs, ways

# What keeps model-written code in: all of these, or it does not run.
PROTECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "user": "it is not root",
        "files": "it reads no file of the host but those of /usr and the interpreter",
        "disk": "it writes no file of the host",
        "network": "it reaches no network, not even the host's own",
        "processes": "it starts no process, and neither signals nor asks about others",
        "calls": "parts of the kernel that nothing splits are closed to it, such as keys and bpf",
        "limits": "it has so much time, memory and open files",
    }
)

# Tries what each protection is against, harmlessly, and prints which attempts failed. Files are
# made without a name, signals are number 0.
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
def make(folder):
    os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR))
def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
arm = os.uname().machine == "aarch64"
of_host = ("/etc/passwd", "/etc/hosts", "/proc/self/status", "/proc/sys/kernel/hostname")
print(json.dumps({
    "user": os.getuid() != 0 and os.geteuid() != 0,
    "files": all(refused(os.open, path, os.O_RDONLY) for path in of_host),
    "disk": all(refused(make, folder) for folder in ("/", "/var/tmp", "/dev/shm", "/usr", FOLDER)),
    "network": refused(connect),
    "processes": refused(fork) and refused(os.kill, PARENT, 0) and refused(os.getpgid, PARENT),
    "calls": refused(libc.syscall, 219 if arm else 250, 0, -3, 1) and refused(libc.unshare, 0),
    "limits": resource.getrlimit(resource.RLIMIT_AS)[1] == MEMORY,
}))
"""
_PROBE_SECONDS, _PROBE_MEMORY_MB = 20.0, 512


@dataclass(frozen=True, kw_only=True)
class Protections:
    """What keeps model-written code in on this machine, as tried out."""

    kind: Kind  # of wall
    held: tuple[str, ...]  # names of `PROTECTIONS`
    missing: tuple[str, ...]
    why: tuple[str, ...]  # reasons why there is no stronger kind


def protections() -> Protections:
    """What would hold a program here. Raises TaskError when none can be started at all."""
    return _choose(os.geteuid(), tuple(programs().items()))[1]


def run_untrusted(
    program: str,
    *,
    check: Check | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
    stop: threading.Event | None = None,
    without: Collection[str] = (),
) -> Verdict:
    """Runs a program, and a check of it in a sandbox of its own; see above what passing means.

    `seconds` is for everything together, `memory_mb` of address space for each of the two. The
    program gets an empty standard input and the `__name__` "__main__". Setting `stop` ends the run
    within 50 ms. `without` names protections that may be missing, for who knows the program.

    Raises TaskError where a protection is missing that is not so named. Nothing has run then.
    """
    way, found = _choose(os.geteuid(), tuple(programs().items()))
    lacking = [name for name in found.missing if name not in without]
    if lacking:
        raise TaskError(
            f"model-written code does not run here: nothing keeps it from {', '.join(lacking)} "
            f"({'; '.join(found.why)}) (install bubblewrap and allow user namespaces, or use Linux "
            "5.13 or newer with Landlock)"
        )
    return run_in(way, program, check=check, seconds=seconds, memory_mb=memory_mb, stop=stop)


@functools.cache
def _choose(_: int, found: tuple[tuple[str, str | None], ...]) -> tuple[Way, Protections]:
    """The first way that has all protections, or that which has most. Found once for each user."""
    why: list[str] = []
    best: tuple[Way, tuple[str, ...]] | None = None
    for way in ways(dict(found)):
        held = way if isinstance(way, str) else _try_out(way)
        if isinstance(held, str):
            why.append(held)
            continue
        assert isinstance(way, Way)
        if best is None or len(held) > len(best[1]):
            best = way, held
        if len(held) == len(PROTECTIONS):
            break
        why.append(f"{way.kind} does not hold {', '.join(sorted(PROTECTIONS.keys() - held))}")
    if best is None:
        raise TaskError(f"model-written code does not run here: {'; '.join(why)}")
    way, held = best
    missing = tuple(name for name in PROTECTIONS if name not in held)
    return way, Protections(kind=way.kind, held=held, missing=missing, why=tuple(why))


def _try_out(way: Way) -> tuple[str, ...] | str:
    """The protections that a way has, as a program in it finds; or why no program runs in it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        facts = {
            "PORT": server.getsockname()[1],
            "PARENT": os.getpid(),
            "FOLDER": os.path.dirname(__file__),  # a user's own, as likely as not
            "MEMORY": _PROBE_MEMORY_MB << 20,
        }
        given = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
        verdict = run_in(
            way,
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
    return tuple(name for name in PROTECTIONS if refused[name])
