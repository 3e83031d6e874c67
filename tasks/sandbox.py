"""Runs Python that a model wrote, where it can reach nothing: under bubblewrap, or not at all.

The program sees a read-only /usr, the interpreter and 32 MB of /tmp; no /proc, no /dev, no network,
no environment, no other process. Started by root, everything happens as user 61234, and the drop
comes before bubblewrap: with root outside, what slips in of root's is root's inside, above all the
kernel's switches under /proc/sys. A filter of system calls closes what namespaces do not split.
Limits are those of `prlimit`, per process, with at most 8 processes; a deadline by the wall clock
ends them all.

What a verdict is worth. An exit code proves nothing and printed text neither: passed means that a
nonce came back. Given a `Check`, tester and program are two sandboxes between which only copies of
plain values pass. The program then holds neither the tests nor the nonce, so all it can do is
answer. Without one, tests are part of the program and run in its process. The nonce is read after
its last statement, but a program that sets out to can find the pipe that holds it, or replace what
the tests compare with: such a verdict is for programs that do not try to deceive.
"""

import inspect
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps

from tasks import sandbox_child
from tasks.sandbox_tools import SandboxTools, open_filter, open_sandbox_tools, sandbox_command

OUTPUT_KEPT = 64 << 10  # bytes
OUTPUT_AT_MOST = 8 << 20  # bytes; a program that prints more is ended

_GONE_AFTER = 10.0  # seconds that killed processes get to be gone, before it counts as a defect


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


def run_untrusted(
    program: str, *, check: Check | None = None, seconds: float = 5.0, memory_mb: int = 512
) -> Verdict:
    """Runs a program, and a check of it in a sandbox of its own; see above what passing means.

    `seconds` is for everything together, `memory_mb` of address space for each process. The program
    gets an empty standard input and the `__name__` "__main__".

    Raises TaskError where no sandbox can be made. Nothing has run then.
    """
    tools = open_sandbox_tools()
    nonce = secrets.token_hex(16)
    with _Processes(tools, seconds=seconds, memory_mb=memory_mb) as processes:
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
                ({**candidate, "program": program}, output_end),
                ({**tester, "verdict": verdict_end}, subprocess.DEVNULL),
            ]
        inputs = {
            processes.start(order, prints_to): _message(order, nonce) for order, prints_to in orders
        }
        return _judge(processes, inputs, verdict, output, nonce, seconds)


def _message(order: Mapping[str, object], nonce: str) -> bytes:
    body = dumps(order).encode()
    return b"%d\n%b%b\n" % (len(body), body, nonce.encode())


class _Processes:
    """The sandboxes of one run and our ends of their pipes; all gone when left."""

    def __init__(self, tools: SandboxTools, *, seconds: float, memory_mb: int) -> None:
        self._tools = tools
        self._seconds = seconds
        self._memory_mb = memory_mb
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
        """Starts a sandbox for an order, with the pipes that it names; gives its standard input.

        Ends that were handed over are closed on our side, so that a reader sees the last writer go.
        """
        stdin, stdin_end = self.pipe()
        filter_fd = open_filter()
        self._open.add(filter_fd)
        command = sandbox_command(
            self._tools,
            inspect.getsource(sandbox_child),
            filter_fd=filter_fd,
            seconds=self._seconds,
            memory_mb=self._memory_mb,
        )
        ends = [filter_fd, *(end for end in order.values() if isinstance(end, int))]
        self._started.append(
            subprocess.Popen(
                command,
                stdin=stdin,
                stdout=prints_to,
                stderr=prints_to,
                pass_fds=ends,
                cwd="/",
                env={},
                start_new_session=True,
            )
        )
        for end in (stdin, prints_to, *ends):
            if end in self._open:
                self.close(end)
        return stdin_end

    def exit_status(self) -> int | None:
        """That of the sandbox started last, where it ends by itself within a second."""
        try:
            return self._started[-1].wait(timeout=1)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends every process of every sandbox: those inside die with bubblewrap's.

        They are then left to process 1 to be reaped: a container needs one that does.
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
) -> Verdict:
    told, printed = bytearray(), bytearray()
    decided = _exchange(
        processes,
        inputs,
        {verdict: told, output: printed},
        until=lambda open_ends: verdict not in open_ends or b"\n" in told or len(told) > 1000,
        seconds=seconds,
    )
    passed = secrets.compare_digest(bytes(told), f"{nonce}\n".encode())
    too_much = len(printed) > OUTPUT_AT_MOST
    status = processes.exit_status() if decided and not told and not too_much else None
    processes.kill()
    _drain((verdict, output))
    if passed:
        reason = "passed"
    elif too_much:
        reason = f"ended: printed more than {OUTPUT_AT_MOST >> 20} MiB"
    elif not decided:
        reason = f"timed out after {seconds:g} s"
    elif told.startswith(b"! "):
        reason = "".join(c for c in told[2:].decode("ascii", "replace") if c.isprintable())
    else:
        reason = f"did not reach its end (exit status {status})"
    return Verdict(
        passed=passed,
        timed_out=not decided and not too_much,
        output=printed[:OUTPUT_KEPT].decode("utf-8", "replace"),
        reason=reason,
    )


def _exchange(
    processes: _Processes,
    inputs: Mapping[int, bytes],
    outputs: Mapping[int, bytearray],
    *,
    until: Callable[[set[int]], bool],
    seconds: float,
) -> bool:
    """Writes the inputs and collects the outputs, until enough is known or time is up.

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
            for key, _ in selector.select(remaining):
                if key.fd in left:
                    left[key.fd] = _write_some(key.fd, left[key.fd])
                    if not left[key.fd]:
                        selector.unregister(key.fd)
                        processes.close(key.fd)
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


def _drain(fds: Sequence[int]) -> None:
    """Waits until nobody holds the other ends: then no process of the run is left."""
    deadline = time.monotonic() + _GONE_AFTER
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"a killed sandbox is not gone after {_GONE_AFTER:g} s"
            for key, _ in selector.select(remaining):
                if not os.read(key.fd, 1 << 16):
                    selector.unregister(key.fd)
