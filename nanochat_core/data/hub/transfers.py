"""Parallel downloads with common progress, which stop at once when the job is interrupted."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias, TypeVar

from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress

THREADS = 8  # the default of the Hub's own client
SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_END = 2.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
OnBytes: TypeAlias = Callable[[int], None]  # called with newly received bytes, from any thread


class ByteProgress:
    """Bytes downloaded so far, of `size` (None means unknown); `log` gets a line now and then."""

    def __init__(self, size: int | None, log: Callable[[str], None], *, done: int = 0) -> None:
        self._size = size
        self._log = log
        self._first = self._done = done  # bytes of an earlier attempt have no part in the speed
        self._began = self._logged = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count received bytes."""
        if count:
            HEARTBEAT.beat("downloading")
        with self._lock:
            self._done += count

    def log_sometimes(self) -> None:
        """Log the progress unless a line was logged a short time ago."""
        now = time.monotonic()
        if now - self._logged < SECONDS_BETWEEN_LINES:
            return
        self._logged = now
        of_all = "" if self._size is None else f" of {self._size / 1e6:,.0f}"
        speed = (self._done - self._first) / (now - self._began) / 1e6
        self._log(f"downloaded {self._done / 1e6:,.0f}{of_all} MB, {speed:.1f} MB/s")


def run_transfers(
    function: Callable[[_Item, OnBytes], _Result],
    items: Sequence[_Item],
    *,
    size: int,
    log: Callable[[str], None],
) -> Generator[_Result]:
    """Yield `function(item, on_bytes)` for every item as it finishes, called in threads.

    `size` is the bytes of all items; `log` gets progress lines in this thread. The first error is
    raised and stops the other calls, in which `on_bytes` raises. A thread that hangs in the network
    is abandoned after a short wait: threads are daemons, and end with the process. Close the
    generator to stop early, so that the threads end too.
    """
    todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    done: queue.SimpleQueue[Future[_Result]] = queue.SimpleQueue()
    stop = threading.Event()
    progress = ByteProgress(size, log)

    def on_bytes(count: int) -> None:
        # Only in our threads: in a thread of the client's own the exception would be lost.
        if stop.is_set() and threading.current_thread() in threads:
            raise _Stopped
        progress.add(count)

    def work() -> None:
        while not stop.is_set():
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            future: Future[_Result] = Future()
            try:
                future.set_result(function(item, on_bytes))
            except BaseException as error:  # noqa: BLE001 - raised where the results are taken
                future.set_exception(error)
            done.put(future)

    for item in items:
        todo.put(item)
    threads = [
        threading.Thread(target=work, name=f"transfer-{i}", daemon=True)
        for i in range(min(THREADS, len(items)))
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in items:
            yield _next(done, progress).result()
    finally:
        stop.set()
        _join([thread for thread in threads if thread.ident is not None])


def fetch_files(
    fetch: Callable[[int, OnBytes], Path], sizes: Sequence[int], progress: Progress
) -> list[Path]:
    """Return `fetch(number, on_bytes)` for each of the files of these sizes (bytes), in order.

    They are fetched in parallel; `progress` counts files and bytes. Errors as in `run_transfers`.
    """
    progress.start(len(sizes), unit="file")
    paths: dict[int, Path] = {}
    done = 0
    transfers = run_transfers(
        lambda number, on_bytes: (number, fetch(number, on_bytes)),
        range(len(sizes)),
        size=sum(sizes),
        log=progress.message,
    )
    with contextlib.closing(transfers) as results:
        for number, path in results:
            paths[number] = path
            done += sizes[number]
            progress.step(len(paths), bytes=done)
    return [paths[number] for number in range(len(sizes))]


def _join(threads: Sequence[threading.Thread]) -> None:
    # One deadline for all threads, not one for each.
    end = time.monotonic() + _SECONDS_TO_END
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _next(done: queue.SimpleQueue[Future[_Result]], progress: ByteProgress) -> Future[_Result]:
    while True:
        try:
            return done.get(timeout=_SECONDS_BETWEEN_LOOKS)
        except queue.Empty:
            progress.log_sometimes()


class _Stopped(BaseException):
    """Another transfer failed, or the job is stopping. It is never reported."""
