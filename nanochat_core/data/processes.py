"""Map a function over items in processes that end with the job, even if it is killed."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import TypeVar

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
    # spawn: a fork would copy locks that threads of torch or pyarrow may hold.
    spawn = multiprocessing.get_context("spawn")
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=(HEARTBEAT.path,))
    try:
        rest = iter(items)
        # While one item is slow the others continue, as far as memory has to hold their results.
        waiting: deque[Future[Result]] = deque()
        waiting.extend(pool.submit(work, item) for item in islice(rest, _AHEAD * processes))
        while waiting:
            yield waiting.popleft().result()
            HEARTBEAT.beat("working")
            waiting.extend(pool.submit(work, item) for item in islice(rest, 1))
    except BrokenProcessPool as error:
        raise StageError(
            "a worker process died",
            hint="see its stderr for the reason; otherwise memory ran out (see dmesg): "
            "run on fewer CPU cores",
        ) from error
    finally:
        # SIGKILL, as a process may be inside C code for minutes.
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        pool.shutdown(cancel_futures=True)


def _begin(heartbeat: Path | None) -> None:
    """Prepare a worker process."""
    # Ctrl-C reaches every process of the terminal: only the job handles it, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that is killed cannot end its workers: Linux does it.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if heartbeat is not None:
        HEARTBEAT.join(heartbeat)
