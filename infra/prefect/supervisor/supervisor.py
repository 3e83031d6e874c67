"""The supervisor of a home: it runs the Prefect server and a worker for each pool.

It restarts each of them when it ends, resumes crashed runs (runs.py), and ends everything on
request: first the runs, which save, then the workers, then the server. If the supervisor itself is
killed, the kernel ends the workers; the server stays for its clients, and the next supervisor finds
it.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from filelock import FileLock, Timeout

from infra.polling import ASK_SECONDS, SLOW_SECONDS
from infra.prefect.access import (
    AUTH,
    WEBHOOK,
    ServerError,
    auth,
    check_admitted,
    configured_api_url,
    configured_webhook,
)
from infra.prefect.logs import last_line, rotate
from infra.prefect.records import find_stack, my_stack, write_record
from infra.prefect.server import client_environment, own_environment, stop_server
from infra.prefect.supervisor.control import SECONDS_TO_END
from infra.prefect.supervisor.processes import Interval, ManagedProcess, end_workers
from infra.prefect.supervisor.runs import RunWatch, is_polling
from infra.prefect.supervisor.servers import OwnServer
from infra.prefect.supervisor.workers import (
    managed_worker,
    worker_environment,
    worker_name,
)
from infra.retry import TRIES

MAX_EARLY_ENDS = 5  # of a worker that never polled: about two minutes


class Supervisor:
    """See the module. All processes are started, checked and ended in the main thread.

    The kernel ends a worker when the thread that started it ends (PR_SET_PDEATHSIG).
    """

    def __init__(
        self,
        home: Path,
        *,
        port: int,  # of the server, or the next free one
        pools: Sequence[str],
        store: str | None,  # of the runs; None means the one that the environment names
        register: Sequence[str],  # the command that registers the deployments; empty for none
        guarded: bool,  # whether a new server requires a password
        log: Callable[[str], None],
    ) -> None:
        self._home = home
        self._store = store
        self._log = log
        self._stop = threading.Event()
        self._hurry = threading.Event()  # asked to stop a second time
        self._record = my_stack()
        self._is_written = True  # False if the last write of the record failed
        self._api_url: str | None = None  # while the server is up
        self._shared = configured_api_url()
        self._server = OwnServer(home, port, guarded=guarded, log=log)
        self._registration = ManagedProcess(
            "registration", list(register), output=home / "prefect" / "register.log", log=log
        )
        self._registrations_left = TRIES if register else 0
        self._workers = {pool: managed_worker(pool, home, log=log) for pool in pools}
        self._runs = RunWatch(log, is_own=self._shared is None)
        self._chores = Interval(SLOW_SECONDS)

    def run(self) -> None:
        """Supervise everything until SIGTERM or Ctrl-C; return when all of it has ended.

        Raises ServerError if the server or a worker cannot be started at all, or the home has a
        supervisor.
        """
        with _only_supervisor(self._home), self._until_signalled():
            write_record(self._home, self._record)
            try:
                while not self._stop.wait(ASK_SECONDS):
                    self._look()
            except ServerError as error:
                self._note(problem=str(error), hint=error.hint)
                raise
            finally:
                self._end()

    def _look(self) -> None:
        """Check everything once and restart what ended. Never blocks on a process."""
        self._look_at_server()
        for pool, worker in self._workers.items():
            if worker.ended() is not None and self._record.state == "starting":
                _check_starts(pool, worker)
        # Workers start after the registration: of simultaneous writers SQLite lets some fail.
        if self._api_url is not None and self._is_registered(self._api_url):
            self._start_workers(self._api_url)
            if self._record.state != "ready" and self._are_polling(self._api_url):
                self._log("ready")
                self._note(state="ready")
        if self._chores.begins():
            if self._api_url is not None:
                self._runs.poll(self._api_url)
            for path in (self._home / "prefect").glob("*.log"):
                rotate(path)
        self._note(
            workers={pool: worker.pid for pool, worker in self._workers.items() if worker.pid}
        )

    def _look_at_server(self) -> None:
        before = self._record.api_url
        if self._shared is None:
            self._api_url = self._server.look()
        elif self._api_url is None and check_admitted(self._shared):
            self._api_url = self._shared
            self._log(f"server: {self._shared} answers")
        if self._api_url is not None and self._api_url != before:
            self._note(api_url=self._api_url)
            # Restarted on another port, because its own was taken: workers have the old address.
            if before is not None:
                end_workers(self._worker_processes())

    def _start_workers(self, api_url: str) -> None:
        for worker in self._workers.values():
            if worker.may_start:
                worker.start(worker_environment(self._home, api_url, store=self._store))

    def _are_polling(self, api_url: str) -> bool:
        """Return whether all workers poll for runs."""
        return all(
            not worker.is_over and is_polling(api_url, pool, worker_name(pool), since=worker.since)
            for pool, worker in self._workers.items()
        )

    def _is_registered(self, api_url: str) -> bool:
        """Return whether the deployments are registered, or all tries are used up."""
        process = self._registration
        if self._registrations_left and (code := process.ended()) is not None:
            self._registrations_left = self._registrations_left - 1 if code else 0
            if code == 0:
                self._log("the deployments are registered")
            else:
                what = f"the deployments could not be registered: {last_line(process.output)}"
                self._log(f"{what}; tries left: {self._registrations_left}")
                if not self._registrations_left:
                    self._note(problem=what, hint=f"its log is {process.output}")
        if self._registrations_left and process.may_start:
            process.start(self._registration_environment(api_url))
        return not self._registrations_left

    def _registration_environment(self, api_url: str) -> dict[str, str]:
        given, webhook = auth(), configured_webhook()
        return {
            **(own_environment() if self._shared is None else os.environ),
            **client_environment(self._home, api_url, console_logs=False),
            **({} if given is None else {AUTH: given}),
            **({} if webhook is None else {WEBHOOK: webhook}),
            "NANOCHAT_HOME": str(self._home),
        }

    def _end(self) -> None:
        """End the runs, the workers and the server."""
        self._log("stopping")
        self._note(state="stopping")
        self._registration.kill()
        end_workers(self._worker_processes(), is_urgent=self._hurry.is_set)
        # The server ends last: runs and workers report their ends to it.
        if self._shared is None:
            stop_server(self._home)
        self._note(workers={})
        self._log("stopped")

    def _worker_processes(self) -> list[psutil.Process]:
        return [psutil.Process(w.pid) for w in self._workers.values() if w.pid and not w.is_over]

    def _note(self, **changes: Any) -> None:
        changed = replace(self._record, **changes)
        if changed == self._record and self._is_written:
            return
        self._record, self._is_written = changed, False
        with contextlib.suppress(OSError):  # a full disk is no reason to end runs: retried later
            write_record(self._home, changed)
            self._is_written = True

    @contextlib.contextmanager
    def _until_signalled(self) -> Generator[None]:
        """Set `_stop` on SIGTERM, Ctrl-C and a closed terminal, and `_hurry` on a second one."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            (self._hurry if self._stop.is_set() else self._stop).set()

        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _check_starts(pool: str, worker: ManagedProcess) -> None:
    """Raise ServerError if the worker of a stack that never was ready has ended too often."""
    # One that polled before is restarted for ever: a full disk or an absent server may pass.
    if worker.early_ends >= MAX_EARLY_ENDS:
        raise ServerError(
            f"the worker of {pool} ended {worker.early_ends} times while starting: "
            f"{last_line(worker.output)}",
            hint=f"its log is {worker.output}",
        )


@contextlib.contextmanager
def _only_supervisor(home: Path) -> Generator[None]:
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    # The kernel releases the lock when its process dies, so a killed supervisor leaves none.
    lock = FileLock(home / "prefect" / "supervisor.lock")
    stack = find_stack(home)
    try:
        lock.acquire(timeout=SECONDS_TO_END if stack and stack.state == "stopping" else 0)
    except Timeout:
        raise ServerError(
            f"{home} has a supervisor already", hint="`nanochat down` stops it"
        ) from None
    with lock:
        yield
