"""Parallel downloads with common progress, which stop at once when the job is interrupted."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NoReturn, TypeAlias, TypeVar

from nanochat_core.runtime.heartbeat import HEART

THREADS = 8  # the default of the Hub's own client
SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_END = 2.0

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
OnBytes: TypeAlias = Callable[[int], None]  # called with newly received bytes, from any thread


def ignore_bytes(count: int) -> None:
    """Discard the count, for a download without progress."""


class Transfers(Generic[_Item, _Result]):
    """Calls of `function` for every item, in threads; `log` gets a progress line now and then.

    `function` also gets an `OnBytes`, which raises in it to stop it. A thread that hangs in the
    network is abandoned after a short wait: threads are daemons, and end with the process.
    """

    def __init__(
        self,
        function: Callable[[_Item, OnBytes], _Result],
        items: Sequence[_Item],
        *,
        size: int,
        log: Callable[[str], None],
    ) -> None:
        self._function = function
        self._items = items
        self._size = size  # bytes of all items
        self._log = log
        self._todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Callable[[], _Result]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._count = 0
        self._began = self._logged = time.monotonic()

    def results(self) -> Generator[_Result]:
        """Yield results as they finish. The first error stops the other calls and is raised.

        Close the generator to stop early, so that the threads end too.
        """
        for item in self._items:
            self._todo.put(item)
        self._threads = [
            threading.Thread(target=self._work, name=f"transfer-{i}", daemon=True)
            for i in range(min(THREADS, len(self._items)))
        ]
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._items:
                yield self._next()()
        finally:
            self._stop.set()
            # One deadline for all threads, not one for each.
            end = time.monotonic() + _SECONDS_TO_END
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(max(0.0, end - time.monotonic()))

    def _next(self) -> Callable[[], _Result]:
        while True:
            try:
                return self._done.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                self._say()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                item = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                result = self._function(item, self._add)
            except BaseException as error:  # noqa: BLE001 - raised where the results are taken
                self._done.put(_raising(error))
                return
            # Bound as a default: the loop assigns the name again.
            self._done.put(lambda result=result: result)

    def _add(self, count: int) -> None:
        # Only in our threads: in a thread of the client's own the exception would be lost.
        if self._stop.is_set() and threading.current_thread() in self._threads:
            raise _Stopped
        if count:
            HEART.beat("downloading")
        with self._lock:
            self._count += count

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._logged < SECONDS_BETWEEN_LINES:
            return
        self._logged = now
        speed = self._count / (now - self._began) / 1e6
        self._log(
            f"downloaded {self._count / 1e6:,.0f} of {self._size / 1e6:,.0f} MB, {speed:.1f} MB/s"
        )


class _Stopped(BaseException):
    """Another transfer failed, or the job is stopping. It is never reported."""


def _raising(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail
