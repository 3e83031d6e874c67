"""Run model-written Python in a sandbox, or not at all if this machine has none.

The program has no network, no environment variables and no other processes. It can read files only
in /usr and of the interpreter, and write only to 32 MB of its own. Its backend is tested from
inside a sandbox before it is used. Limits on CPU time, memory, threads, files and output, and a
wall-clock deadline, end the program.

How far a verdict can be trusted: exit codes and printed text prove nothing, so "passed" means that
a nonce was returned. Tester and program are two sandboxes that exchange only copies of plain
values: the program has neither the tests nor the nonce, and can only answer calls.
"""

import functools
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tasks.base import TaskError
from tasks.sandbox.backends import Backend, find_backends
from tasks.sandbox.process import Check, Verdict, run_in

# Attempts, harmlessly, what each protection forbids, and prints those that do not hold:
#
#     user       it is not root
#     files      it reads no file of the host but those of /usr and the interpreter
#     disk       it neither writes nor truncates a file of the host
#     network    it reaches no network, not even the host's own, and no socket of the host
#     processes  it starts no process, and neither signals nor asks about others
#     calls      parts of the kernel that nothing splits are closed to it, such as keys and bpf
#     limits     it has so much time, memory and open files
#
# SCRATCH is a file in a folder that it may read; signals are number 0, which is never delivered.
_PROBE = """
import ctypes, os, resource, socket
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
other = PARENT if PARENT != os.getpid() else 1  # numbers begin again in a namespace
held = {
    "user": os.getuid() != 0 and os.geteuid() != 0,
    "files": all(refused(os.open, path, os.O_RDONLY) for path in of_host),
    "disk": all(refused(make, folder) for folder in ("/", "/var/tmp", "/dev/shm", "/usr", FOLDER))
        and refused(truncate) and refused(os.truncate, SCRATCH, 0),
    "network": refused(connect) and refused(name),
    "processes": refused(fork) and refused(os.kill, other, 0) and refused(os.getpgid, other),
    "calls": refused(libc.syscall, 219 if arm else 250, 0, -3, 1) and refused(share)
        and refused(libc.unshare, 0),
    "limits": resource.getrlimit(resource.RLIMIT_AS)[1] == MEMORY,
}
print(", ".join(sorted(name for name in held if not held[name])))
def probed():
    pass
"""
_PROBED = Check(setup="", test="def check(probed): probed()", entry_point="probed")
_SECONDS_BETWEEN_LOOKS = 0.01
_PROBE_SECONDS, _PROBE_MEMORY_MB = 20.0, 512


def run_untrusted(
    program: str,
    check: Check,
    *,
    seconds: float = 5.0,
    memory_mb: int = 512,
    stop: threading.Event | None = None,
) -> Verdict:
    """Run a program and its check; see the module on what "passed" means.

    `seconds` limits both together, `memory_mb` the address space of each of the two. The program
    gets an empty standard input and the `__name__` "__main__". Setting `stop` ends the run within
    50 ms.

    Raises TaskError if a protection is missing; nothing has run then.
    """
    return run_in(protections(), program, check, seconds=seconds, memory_mb=memory_mb, stop=stop)


def run_all(runs: Sequence[tuple[str, Check]], *, seconds: float, memory_mb: int) -> list[Verdict]:
    """Return the verdicts on programs, in their order; equal pairs of program and check run once.

    One runs per CPU, so that no deadline passes while a program waits for a CPU. An exception in
    the waiting thread, such as Ctrl-C, ends all at once. Raises TaskError as `run_untrusted` does.
    """
    # Sampled answers often repeat.
    different = list(dict.fromkeys(runs))
    stop = threading.Event()
    found: list[Verdict] = []
    errors: list[BaseException] = []
    ended: list[bool] = []

    def verdict(run: tuple[str, Check]) -> Verdict:
        if stop.is_set():
            raise CancelledError
        return run_untrusted(*run, seconds=seconds, memory_mb=memory_mb, stop=stop)

    def work() -> None:
        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "sandbox") as pool:
                try:
                    found.extend(pool.map(verdict, different))
                except BaseException:
                    stop.set()
                    raise
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            errors.append(error)
        finally:
            ended.append(True)

    # What a signal's handler raises, such as Ctrl-C, may leave a lock of the pool held for ever if
    # it is raised while the pool is called, and after it in Thread.join a second one returns at
    # once (Python 3.11). So this thread calls neither.
    threading.Thread(target=work, name="run-all", daemon=True).start()
    try:
        _sleep_until(ended)
    except BaseException:
        stop.set()
        _sleep_until(ended)
        raise
    if errors:
        raise errors[0]
    verdicts = dict(zip(different, found, strict=True))
    return [verdicts[run] for run in runs]


def _sleep_until(ended: list[bool]) -> None:
    while not ended:
        time.sleep(_SECONDS_BETWEEN_LOOKS)


@functools.cache
def protections() -> Backend:
    """Return the first backend that holds here, as tested. Raises TaskError if there is none."""
    why: list[str] = []
    for backend in find_backends():
        if isinstance(backend, str):
            why.append(backend)
        elif fault := _find_fault(backend):
            why.append(f"{backend.kind} {fault}")
        else:
            return replace(backend, why=tuple(why))
    raise TaskError(
        f"model-written code does not run here: {'; '.join(why)} (install bubblewrap 0.8 and allow "
        "user namespaces, or use Linux 5.13 or newer with Landlock)"
    )


def _find_fault(backend: Backend) -> str:
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
        try:
            verdict = run_in(
                replace(backend, readable=(*backend.readable, folder)),
                given + _PROBE,
                _PROBED,
                seconds=_PROBE_SECONDS,
                memory_mb=_PROBE_MEMORY_MB,
            )
        except (OSError, subprocess.SubprocessError) as error:  # the user may not be changed
            return f"does not start: {error}"
    printed = verdict.output.strip()
    if not verdict.passed:
        return f"does not start: {(printed.splitlines() or [verdict.reason])[-1]}"
    return printed and f"does not hold {printed}"
