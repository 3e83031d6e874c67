"""One run in a sandbox: its processes and pipes, the deadline, and the verdict.

With a `Check`, tester and program are two sandboxes that exchange only copies of plain values; see
`tasks.sandbox.run` for how far a verdict can be trusted.
"""

import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tasks.sandbox.backends import Way, command_of, message, order_for

OUTPUT_KEPT = 64 << 10  # bytes
OUTPUT_AT_MOST = 8 << 20  # bytes; a program that prints more is killed

_LOOK_FOR_STOP = 0.05  # seconds
_GONE_AFTER = 10.0  # seconds until killed processes must have closed their pipes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a run."""

    passed: bool
    timed_out: bool
    output: str  # what the program printed, both streams, at most 64 KiB
    reason: str  # one line; a program can make it say anything


@dataclass(frozen=True, kw_only=True)
class Check:
    """A test of one function, which the program under test never sees."""

    setup: str  # source run before the test, which gets its functions if the program has them too
    test: str  # source that defines `check(candidate)`, which raises if the candidate is wrong
    entry_point: str  # the candidate's name in the program


def run_in(
    way: Way,
    program: str,
    *,
    check: Check | None,
    seconds: float,
    memory_mb: int,
    stop: threading.Event | None,
) -> Verdict:
    """Run a program, and its check in a second sandbox, until they end or `stop` is set."""
    if stop is not None and stop.is_set():
        return Verdict(passed=False, timed_out=False, output="", reason="stopped")
    # Unguessable and new for each run, so that no program can know it beforehand.
    nonce = secrets.token_hex(16)
    with _Processes(way) as processes:
        verdict, verdict_end = processes.pipe()
        output, output_end = processes.pipe()
        if check is None:
            orders = [({"role": "program", "program": program, "verdict": verdict_end}, output_end)]
        else:
            asked, ask = processes.pipe()
            answered, answer = processes.pipe()
            candidate = {"role": "candidate", "requests": asked, "replies": answer}
            tester = {"role": "tester", "requests": ask, "replies": answered, **vars(check)}
            orders = [
                ({**tester, "verdict": verdict_end}, subprocess.DEVNULL),
                ({**candidate, "program": program}, output_end),
            ]
        first = order_for(way, seconds=seconds, memory_mb=memory_mb)
        inputs = {
            processes.start(order, prints_to): message({**first, **order}, nonce)
            for order, prints_to in orders
        }
        return _verdict(processes, inputs, verdict, output, nonce, seconds, stop)


class _Processes:
    """The sandboxes of one run and our ends of their pipes; a context manager that ends all."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._started: list[subprocess.Popen[bytes]] = []
        self._open: set[int] = set()

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for fd in list(self._open):
            self.close(fd)

    def pipe(self) -> tuple[int, int]:
        """Return a new pipe, reading end first."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def close(self, fd: int) -> None:
        """Close an end of a pipe."""
        self._open.discard(fd)
        os.close(fd)

    def start(self, order: Mapping[str, object], prints_to: int) -> int:
        """Start a sandbox for an order, with the pipes that it names.

        Returns the writing end of its standard input. It stays open as a sign of life: inside, a
        closed end means that this process has died.
        """
        stdin, stdin_end = self.pipe()
        ends = [end for end in order.values() if isinstance(end, int)]
        process = subprocess.Popen(
            command_of(self._way),
            stdin=stdin,
            stdout=prints_to,
            stderr=prints_to,
            pass_fds=ends,
            cwd="/",
            env={},
            start_new_session=True,
        )
        self._started.append(process)
        # Closed on our side, or a reader would not see EOF when the last writer ends.
        for end in (stdin, prints_to, *ends):
            if end in self._open:
                self.close(end)
        return stdin_end

    def exit_status(self) -> int | None:
        """Return the status of the sandbox started last, if it ends within a second, else None.

        128 + n means signal n, as in bubblewrap and shells.
        """
        try:
            status = self._started[-1].wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else 128 - status

    def kill(self) -> None:
        """Kill every process of every sandbox: those inside die with bubblewrap's.

        Process 1 must reap orphans of bubblewrap: a container needs an init process that does.
        """
        for process in self._started:
            if process.returncode is None:  # else its pid may have been reused
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _verdict(
    processes: _Processes,
    inputs: Mapping[int, bytes],
    verdict: int,
    output: int,
    nonce: str,
    seconds: float,
    stop: threading.Event | None,
) -> Verdict:
    reported, printed = bytearray(), bytearray()
    decided = _exchange(
        inputs,
        {verdict: reported, output: printed},
        until=lambda ends: verdict not in ends or b"\n" in reported or len(reported) > 1000,
        seconds=seconds,
        stop=stop,
    )
    stopped = not decided and stop is not None and stop.is_set()
    # Only the nonce counts: a program controls its exit code and what it prints.
    passed = secrets.compare_digest(bytes(reported), f"{nonce}\n".encode())
    too_much = len(printed) > OUTPUT_AT_MOST
    status = processes.exit_status() if decided and not reported and not too_much else None
    processes.kill()
    # A process that survives the kill is outside of any sandbox: nothing of this run is trusted.
    if not _drained((verdict, output)):
        passed = False
        reason = f"its pipes are still open {_GONE_AFTER:g} s after its processes were killed"
    elif passed:
        reason = "passed"
    elif too_much:
        reason = f"ended: printed more than {OUTPUT_AT_MOST >> 20} MiB"
    elif stopped:
        reason = "stopped"
    elif not decided:
        reason = f"timed out after {seconds:g} s"
    elif reported.startswith(b"! "):
        reason = "".join(c for c in reported[2:].decode("ascii", "replace") if c.isprintable())
    else:
        reason = f"did not reach its end (exit status {status})"
    return Verdict(
        passed=passed,
        timed_out=not (decided or too_much or stopped),
        output=printed[:OUTPUT_KEPT].decode("utf-8", "replace"),
        reason=reason,
    )


def _exchange(
    inputs: Mapping[int, bytes],
    outputs: Mapping[int, bytearray],
    *,
    until: Callable[[set[int]], bool],
    seconds: float,
    stop: threading.Event | None,
) -> bool:
    """Write the inputs and collect the outputs, until `until`, the deadline or `stop`.

    `until` is called with the outputs whose writers are alive. Returns True if it became true.
    """
    deadline = time.monotonic() + seconds
    open_ends = set(outputs)
    left = {fd: memoryview(data) for fd, data in inputs.items()}
    with selectors.DefaultSelector() as selector:
        # Non-blocking, as a program need not read its input.
        for fd in left:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_WRITE)
        for fd in outputs:
            selector.register(fd, selectors.EVENT_READ)
        while not until(open_ends):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or any(len(data) > OUTPUT_AT_MOST for data in outputs.values()):
                return False
            if stop is not None and stop.is_set():
                return False
            for key, _ in selector.select(min(remaining, _LOOK_FOR_STOP) if stop else remaining):
                if key.fd in left:
                    left[key.fd] = _write_some(key.fd, left[key.fd])
                    if not left[key.fd]:
                        selector.unregister(key.fd)
                elif data := os.read(key.fd, 1 << 16):
                    outputs[key.fd].extend(data)
                else:
                    selector.unregister(key.fd)
                    open_ends.discard(key.fd)
    return True


def _write_some(fd: int, data: memoryview) -> memoryview:
    """Write what fits into the pipe; return the rest, nothing if the reader is gone."""
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _drained(fds: Sequence[int]) -> bool:
    """Wait until no process holds the other ends; return False if one still does.

    Called after each process of the run was killed.
    """
    deadline = time.monotonic() + _GONE_AFTER
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            for key, _ in selector.select(remaining):
                if not os.read(key.fd, 1 << 16):
                    selector.unregister(key.fd)
    return True
