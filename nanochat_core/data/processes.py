"""Map a function over items in processes that end with the job, even if it is killed.

`concurrent.futures` is not used: if a process is killed while it writes its result, the executor's
thread reads forever, and the job never ends. Here every process has its own pipe, and there are no
threads.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

from nanochat_core.errors import StageError
from nanochat_core.runtime.heartbeat import HEARTBEAT

_PR_SET_PDEATHSIG = 1
_AHEAD = 4  # items in progress or finished per process, counted from the next result

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], *, processes: int
) -> Iterator[Result]:
    """Yield `work(item)` of every item, in order; in this process if `processes` is 1.

    `work`, its argument and its result are pickled: module-level functions and plain data. Its
    exceptions are raised here. Raises StageError if a process dies. No process remains when the
    iteration ends, in whatever way.
    """
    processes = min(processes, len(items))
    if processes < 2:
        for item in items:
            yield work(item)
            HEARTBEAT.beat("working")
        return
    workers: dict[Connection, SpawnProcess] = {}  # by the parent's end of their pipe
    try:
        for _ in range(processes):
            pipe, process = _start(work)
            workers[pipe] = process
        yield from _results(items, list(workers))
    finally:
        # All are killed before the first is waited for. SIGKILL, as a worker may be inside C code.
        for process in workers.values():
            process.kill()
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def _start(work: Callable[[Any], Any]) -> tuple[Connection, SpawnProcess]:
    # spawn: a fork would copy locks that threads of torch or pyarrow may hold.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, HEARTBEAT.path), daemon=True)
    process.start()
    theirs.close()  # so that the pipe reports EOF when the process ends
    return ours, process


def _results(items: Sequence[Any], pipes: list[Connection]) -> Iterator[Any]:
    """Send items to processes as they become free; yield their results in order.

    While one is slow, the others continue for a few items; the limit bounds the stored results.
    """
    most = _AHEAD * len(pipes)
    free = list(pipes)
    early: dict[int, Any] = {}
    sent = given = 0
    while given < len(items):
        # Counted from the next result to yield, so that one slow item bounds what is stored.
        while free and sent < min(given + most, len(items)):
            try:
                free.pop().send((sent, items[sent]))
            except OSError as error:  # the process was killed while it was idle
                raise _died() from error
            sent += 1
        if given in early:
            yield early.pop(given)
            given += 1
            continue
        for pipe in wait([pipe for pipe in pipes if pipe not in free]):
            assert isinstance(pipe, Connection)
            number, result, error = _receive(pipe)
            if error is not None:
                raise error
            HEARTBEAT.beat("working")
            early[number] = result
            free.append(pipe)


def _receive(pipe: Connection) -> tuple[int, Any, Exception | None]:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise _died() from error


def _died() -> StageError:
    return StageError(
        "a worker process died",
        hint="see its stderr for the reason; otherwise memory ran out (see dmesg): "
        "run on fewer CPU cores",
    )


def _serve(pipe: Connection, work: Callable[[Any], Any], heartbeat: Path | None) -> None:
    """Process items in a worker process until the parent closes the pipe."""
    # Ctrl-C reaches every process of the terminal: only the job handles it, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that is killed cannot end its workers: Linux does it.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if heartbeat is not None:
        HEARTBEAT.join(heartbeat)
    while True:
        try:
            number, item = pipe.recv()
        except EOFError:
            return
        try:
            answer = (number, work(item), None)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            # Pickling drops the traceback, so it travels as a note.
            error.add_note(traceback.format_exc())
            answer = (number, None, error)
        pipe.send(answer)
