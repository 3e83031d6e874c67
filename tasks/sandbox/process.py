"""One run in a sandbox: its processes and pipes, the deadline, and the verdict.

Given a `Check`, tester and program are two sandboxes between which only copies of plain values
pass; see `tasks.sandbox.run` for what a verdict is worth.
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
OUTPUT_AT_MOST = 8 << 20  # bytes; a program that prints more is ended

_LOOK_FOR_STOP = 0.05  # seconds
_GONE_AFTER = 10.0  # seconds that killed processes get to be gone


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run went."""

    passed: bool
    timed_out: bool
    output: str  # what the program printed, both streams, at most 64 KiB
    reason: str  # one line; a program can make it say anything


@dataclass(frozen=True, kw_only=True)
class Check:
    """A test of one function, which the program under test never sees."""

    setup: str  # source run before the test; of its functions it has those the program defines too
    test: str  # source that defines `check(candidate)`, which raises when the candidate is wrong
    entry_point: str  # what the program calls the candidate


def run_in(
    way: Way,
    program: str,
    *,
    check: Check | None,
    seconds: float,
    memory_mb: int,
    stop: threading.Event | None,
) -> Verdict:
    """Runs a program, and a check of it in a sandbox of its own, until `stop` is set at most."""
    if stop is not None and stop.is_set():
        return Verdict(passed=False, timed_out=False, output="", reason="stopped")
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
        return _judge(processes, inputs, verdict, output, nonce, seconds, stop)


class _Processes:
    """The sandboxes of one run and our ends of their pipes; all gone when left."""

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
        """A new pipe, reading end first."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def close(self, fd: int) -> None:
        """Closes an end of a pipe."""
        self._open.discard(fd)
        os.close(fd)

    def start(self, order: Mapping[str, object], prints_to: int) -> int:
        """Start a sandbox that an order is for, with the pipes that it names.

        Returns the end of its standard input, which stays open: it shows that this process lives.
        Ends that were handed over are closed on our side, so that a reader sees the last writer go.
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
        for end in (stdin, prints_to, *ends):
            if end in self._open:
                self.close(end)
        return stdin_end

    def exit_status(self) -> int | None:
        """That of the sandbox started last, where it ends by itself within a second.

        128 and more say which signal ended it, as bubblewrap and shells do.
        """
        try:
            status = self._started[-1].wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else 128 - status

    def kill(self) -> None:
        """Ends every process of every sandbox: those inside die with bubblewrap's.

        Bubblewrap's are then left to process 1 to be reaped: a container needs one that does.
        """
        for process in self._started:
            if process.returncode is None:  # else its number may be another's by now
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _judge(
    processes: _Processes,
    inputs: Mapping[int, bytes],
    verdict: int,
    output: int,
    nonce: str,
    seconds: float,
    stop: threading.Event | None,
) -> Verdict:
    told, printed = bytearray(), bytearray()
    decided = _exchange(
        inputs,
        {verdict: told, output: printed},
        until=lambda open_ends: verdict not in open_ends or b"\n" in told or len(told) > 1000,
        seconds=seconds,
        stop=stop,
    )
    stopped = not decided and stop is not None and stop.is_set()
    passed = secrets.compare_digest(bytes(told), f"{nonce}\n".encode())
    too_much = len(printed) > OUTPUT_AT_MOST
    status = processes.exit_status() if decided and not told and not too_much else None
    processes.kill()
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
    elif told.startswith(b"! "):
        reason = "".join(c for c in told[2:].decode("ascii", "replace") if c.isprintable())
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
    """Writes the inputs and collects the outputs, until enough is known, time is up or `stop`.

    `until` is given the outputs whose writers still live. Gives whether it came true.
    """
    deadline = time.monotonic() + seconds
    open_ends = set(outputs)
    left = {fd: memoryview(data) for fd, data in inputs.items()}
    with selectors.DefaultSelector() as selector:
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
    """Writes what fits; gives the rest, which is nothing when there is no reader any more."""
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _drained(fds: Sequence[int]) -> bool:
    """Wait until no process holds the other ends; False if one still does, outside of any sandbox.

    Each process of the run has been killed by then.
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
