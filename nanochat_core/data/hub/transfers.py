"""The progress of downloads, and an end to the wait for one when the job is interrupted."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias, TypeVar

from nanochat_core.runtime.heartbeat import HEARTBEAT

SECONDS_BETWEEN_LINES = 10.0
_SECONDS_TO_END = 2.0

_Result = TypeVar("_Result")
Log: TypeAlias = Callable[[str], None]


class ByteProgress:
    """Bytes downloaded so far, of `size` (None means unknown); `log` gets a line now and then."""

    def __init__(self, size: int | None, log: Log) -> None:
        self._of_all = "" if size is None else f" of {size / 1e6:,.0f}"
        self._log = log
        self._done = 0
        self._began = self._logged = time.monotonic()
        self._lock = threading.Lock()
        self.is_stopped = False  # no one waits for the bytes any more

    def add(self, count: int) -> None:
        """Count received bytes, from any thread. Ends the thread once it is stopped."""
        if self.is_stopped:
            raise _Stopped
        HEARTBEAT.beat("downloading")
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._logged >= SECONDS_BETWEEN_LINES:
                self._logged = now
                speed = self._done / (now - self._began) / 1e6
                self._log(f"downloaded {self._done / 1e6:,.0f}{self._of_all} MB, {speed:.1f} MB/s")


class _Stopped(BaseException):
    """The job is stopping. No `except` of the Hub's client catches it, and it is never reported."""


def run_interruptible(action: Callable[[], _Result], progress: ByteProgress) -> _Result:
    """Return `action()`, called in a thread. It counts in `progress`.

    A signal ends the wait at once: the thread is abandoned, and ends when it counts next or with
    the process.
    """
    # A pool of the client's own would wait until its downloads end, which may take minutes.
    future: Future[_Result] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            future.set_exception(error)

    thread = threading.Thread(target=work, name="download", daemon=True)
    thread.start()
    try:
        return future.result()
    finally:
        progress.is_stopped = True
        thread.join(_SECONDS_TO_END)
