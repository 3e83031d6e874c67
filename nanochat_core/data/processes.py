"""A pool of processes that ends with the job: on an exception, a signal or the job's own death."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from nanochat_core.errors import StageError

_PR_SET_PDEATHSIG = 1


def usable_cores() -> int:
    """CPU cores this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def open_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """An executor of `processes` fresh processes. Whatever leaves the block early kills them.

    Raises StageError when one of them is killed.
    """
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )
    try:
        yield pool
    except BrokenProcessPool as error:
        raise StageError(
            "a worker process was killed",
            hint="out of memory is the usual reason: dmesg says so; fewer CPU cores need less",
        ) from error
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        pool.shutdown()


def _begin() -> None:
    """Ctrl-C reaches the whole terminal group: the job decides, and takes its processes along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
