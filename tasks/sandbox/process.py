"""One run of a program and its check: two sandboxes, their pipes, the deadline, and the verdict."""

import contextlib
import functools
import json
import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass

from tasks.sandbox.backends import USER, Backend, restrictions

OUTPUT_KEPT = 64 << 10  # bytes
OUTPUT_AT_MOST = 8 << 20  # bytes; a program that prints more is killed

# util-linux's: BusyBox's program of that name has no such options.
_CHANGE_USER = "/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"
_LOOK_FOR_STOP = 0.05  # seconds
_GONE_AFTER = 10.0  # seconds until killed processes must have closed their pipes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a run."""

    passed: bool
    output: str  # what program and check printed, both streams, at most 64 KiB
    reason: str  # one line; a program can make it say anything


@dataclass(frozen=True, kw_only=True)
class Check:
    """A test of one function, which the program under test never sees."""

    setup: str  # source run before the test, which gets its functions if the program has them too
    test: str  # source that defines `check(candidate)`, which raises if the candidate is wrong
    entry_point: str  # the candidate's name in the program


def run_in(
    backend: Backend,
    program: str,
    check: Check,
    *,
    seconds: float,
    memory_mb: int,
    stop: threading.Event | None = None,
) -> Verdict:
    """Run a program and its check in two sandboxes until they end or `stop` is set."""
    # Unguessable and new for each run, so that no program can know it beforehand.
    nonce = f"{secrets.token_hex(16)}\n".encode()
    both = restrictions(backend, seconds=seconds, memory_mb=memory_mb)
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as ours:
        ours.callback(_kill, processes)
        living = ours.enter_context(contextlib.ExitStack())
        # Closed after the start: a reader sees no EOF while this process has a writer's end.
        with contextlib.ExitStack() as theirs:
            verdict, verdict_end = _pipe(ours, theirs)
            output, output_end = _pipe(ours, theirs)
            asked, ask = _pipe(theirs, theirs)
            answered, answer = _pipe(theirs, theirs)
            life, _ = _pipe(theirs, living)
            tester_life, nonce_end = _pipe(theirs, living)
            os.write(nonce_end, nonce)  # only the tester's: a program could return what it reads
            tester = {"requests": ask, "replies": answered, "verdict": verdict_end}
            tester |= {"life": tester_life, **asdict(check)}
            of_program = {"requests": asked, "replies": answer, "life": life, "program": program}
            for order in (tester, of_program):
                file = order_file({**both, **order})
                theirs.callback(os.close, file)
                processes.append(_start(backend, order, file, output_end))
        return _verdict(processes, living.close, verdict, output, nonce, seconds, stop)


def order_file(order: Mapping[str, object]) -> int:
    """Return a file in memory, open at its start, that has an order."""
    file = os.memfd_create("order")
    with open(file, "wb", closefd=False) as stream:
        stream.write(json.dumps(order).encode())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """Return a new pipe, reading end first; the stacks close its ends."""
    ends = os.pipe()
    for stack, end in zip((reader, writer), ends, strict=True):
        stack.callback(os.close, end)
    return ends


def _start(
    backend: Backend, order: Mapping[str, object], file: int, output: int
) -> subprocess.Popen[bytes]:
    """Start a sandbox for the order in `file`, with the pipes that it names."""
    # Root changes the user before bubblewrap, not inside: in a namespace made by root, visible
    # files of root's belong to the sandbox's root, above all the kernel's settings in /proc/sys.
    as_root = os.geteuid() == 0
    # Popen itself changes the user after fork only, not vfork: to copy a large process's page
    # tables takes longer than the run.
    changes = _CHANGE_USER if as_root and _works(_CHANGE_USER) else ()
    by_popen = as_root and not changes
    return subprocess.Popen(
        [*changes, *backend.command],
        stdin=file,
        stdout=output,
        stderr=output,
        pass_fds=[end for end in order.values() if isinstance(end, int)],
        cwd="/",
        env={},
        start_new_session=True,
        user=USER if by_popen else None,
        group=USER if by_popen else None,
        extra_groups=() if by_popen else None,
    )


@functools.cache
def _works(change_user: tuple[str, ...]) -> bool:
    """Return whether a program can be started with this before its command."""
    try:
        done = subprocess.run([*change_user, "/bin/true"], capture_output=True, env={})
    except OSError:
        return False
    return done.returncode == 0


def _kill(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Kill every process of every sandbox: those inside die with bubblewrap's.

    The pipes `life` have to be closed before: a sandbox's init process that has not asked yet to
    die with bubblewrap's survives, and what it then starts looks at its pipe and ends.

    Process 1 must reap orphans of bubblewrap: a container needs an init process that does.
    """
    for process in processes:
        if process.returncode is None:  # else its pid may have been reused
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _verdict(
    processes: Collection[subprocess.Popen[bytes]],
    close_life: Callable[[], None],
    verdict: int,
    output: int,
    nonce: bytes,
    seconds: float,
    stop: threading.Event | None,
) -> Verdict:
    reported, printed = bytearray(), bytearray()
    decided = _collect(
        {verdict: reported, output: printed},
        until=lambda alive: verdict not in alive or b"\n" in reported or len(reported) > 1000,
        seconds=seconds,
        stop=stop,
    )
    close_life()
    _kill(processes)
    # Only the nonce counts: a program controls its exit code and what it prints.
    passed = secrets.compare_digest(bytes(reported), nonce)
    rest = {verdict: bytearray(), output: bytearray()}
    # A process that survives the kill is outside of any sandbox: nothing of this run is trusted.
    # Until the kill reaches a program inside, it may print more than the limit.
    if not _collect(rest, until=lambda alive: not alive, seconds=_GONE_AFTER, limited=False):
        passed = False
        reason = f"its pipes are still open {_GONE_AFTER:g} s after its processes were killed"
    elif passed:
        reason = "passed"
    elif len(printed) > OUTPUT_AT_MOST:
        reason = f"ended: printed more than {OUTPUT_AT_MOST >> 20} MiB"
    elif not decided:
        stopped = stop is not None and stop.is_set()
        reason = "stopped" if stopped else f"timed out after {seconds:g} s"
    elif reported.startswith(b"! "):
        reason = "".join(c for c in reported[2:].decode("ascii", "replace") if c.isprintable())
    else:
        reason = "its check did not reach its end"
    kept = (printed + rest[output])[:OUTPUT_KEPT]
    return Verdict(passed=passed, output=kept.decode("utf-8", "replace"), reason=reason)


def _collect(
    outputs: Mapping[int, bytearray],
    *,
    until: Callable[[Collection[int]], bool],
    seconds: float,
    stop: threading.Event | None = None,
    limited: bool = True,
) -> bool:
    """Read pipes until `until`, which gets those with a writer, is true; return whether it was.

    False at the deadline, when `stop` is set, or when there is too much output; unless `limited`,
    what is too much is dropped.
    """
    deadline = time.monotonic() + seconds
    alive = set(outputs)
    with selectors.DefaultSelector() as selector:
        for fd in outputs:
            selector.register(fd, selectors.EVENT_READ)
        while not until(alive):
            remaining = deadline - time.monotonic()
            is_too_much = any(len(data) > OUTPUT_AT_MOST for data in outputs.values())
            if remaining <= 0 or (limited and is_too_much):
                return False
            if stop is not None and stop.is_set():
                return False
            for key, _ in selector.select(min(remaining, _LOOK_FOR_STOP) if stop else remaining):
                if data := os.read(key.fd, 1 << 16):
                    if len(outputs[key.fd]) <= OUTPUT_AT_MOST:
                        outputs[key.fd].extend(data)
                else:
                    selector.unregister(key.fd)
                    alive.discard(key.fd)
    return True
