"""The supervisor of a home: it runs the Prefect server and a worker for each pool.

It restarts each of them when it ends, reports the lost runs of a dead worker to Prefect at once,
and ends everything on request: first the runs, which save, then the workers, then the server. If
the supervisor itself is killed, the kernel ends the workers; the server stays for its clients, and
the next supervisor finds it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from infra.prefect.access import (
    AUTH,
    WEBHOOK,
    ServerError,
    auth,
    configured_api_url,
    configured_webhook,
)
from infra.prefect.logs import rotate
from infra.prefect.records import my_stack, runs_of_last, write_record
from infra.prefect.server import client_environment, own_environment, stop_server
from infra.prefect.supervisor.processes import (
    SECONDS_TO_SAVE,
    Interval,
    ManagedProcess,
    Orphans,
    end_leftovers,
    leftovers,
)
from infra.prefect.supervisor.runs import look_for_crashed, report_lost
from infra.prefect.supervisor.servers import OwnServer, SharedServer
from infra.prefect.supervisor.workers import PrefectWorker

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_STOP = 10.0  # a worker without runs
SECONDS_TO_REPORT = 15.0  # lost runs to Prefect, when the stack stops
REGISTRATIONS = 3  # tries to register the deployments


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
        self._log = log
        self._stop = threading.Event()
        self._hurry = threading.Event()  # asked to stop a second time
        self._record = my_stack()
        self._is_written = True  # False if the last write of the record failed
        self._api_url: str | None = None  # while the server is up
        shared = configured_api_url()
        self._is_own = shared is None
        self._server = (
            OwnServer(home, port, guarded=guarded, log=log)
            if shared is None
            else SharedServer(shared, log=log)
        )
        self._registration = ManagedProcess(
            "registration", list(register), output=home / "prefect" / "register.log", log=log
        )
        self._registrations_left = REGISTRATIONS if register else 0
        self._workers = [PrefectWorker(pool, home, store=store, log=log) for pool in pools]
        # Flow run id -> unix seconds: lost runs that Prefect does not know of yet. A run that began
        # later than that has been resumed elsewhere.
        self._lost: dict[str, float] = {}
        self._crashed_runs = Interval(10)
        self._orphans, self._orphans_look = Orphans(home), Interval(10)
        self._long_logs = Interval(60)

    def run(self) -> None:
        """Supervise everything until SIGTERM or Ctrl-C; return when all of it has ended.

        Raises ServerError if the server cannot be started at all, or the home has a supervisor.
        """
        with _only_supervisor(self._home), self._until_signalled():
            # Read before the record is overwritten: runs that an earlier, killed supervisor left.
            self._lost = runs_of_last(self._home)
            write_record(self._home, self._record)
            try:
                # Of an earlier, killed supervisor: its runs' processes may still hold the GPUs.
                end_leftovers(self._home)
                while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
                    self._look()
            except ServerError as error:
                self._note(state="failed", problem=str(error), hint=error.hint)
                raise
            finally:
                self._end()

    def _look(self) -> None:
        """Check everything once and restart what ended. Never blocks on a process."""
        self._look_at_server()
        # Workers start after the registration: of simultaneous writers SQLite lets some fail.
        if self._api_url is not None and self._is_registered(self._api_url):
            # Runs that began after this moment are not of the worker that ended.
            for worker in self._workers:
                self._lost |= dict.fromkeys(worker.look(self._api_url), time.time())
            self._report(self._api_url, "its worker ended", resume=False)
            if self._is_own and self._crashed_runs.begins():
                look_for_crashed(self._api_url, now=time.time(), log=self._log)
            if self._record.state != "ready" and all(
                worker.is_ready(self._api_url) for worker in self._workers
            ):
                self._log("ready")
                self._note(state="ready")
        if self._orphans_look.begins():
            # A rank that hangs would hold its GPU, and stages of other jobs would lack the memory.
            runs = (attempt.process.pid for worker in self._workers for attempt in worker.attempts)
            pids = (worker.process.pid for worker in self._workers)
            self._orphans.look({*runs, *(pid for pid in pids if pid is not None)})
        if self._long_logs.begins():
            for path in (self._home / "prefect").glob("*.log"):
                rotate(path)
        processes = {worker.pool: worker.process.pid for worker in self._workers}
        self._note(
            workers={pool: pid for pool, pid in processes.items() if pid is not None},
            runs=[*self._lost, *(a.flow_run for w in self._workers for a in w.attempts)],
        )

    def _look_at_server(self) -> None:
        before, self._api_url = self._record.api_url, self._server.look()
        if (server := self._server.server) is not None:
            self._note(server=server.pid, database=server.database)
        if self._api_url is not None and self._api_url != before:
            self._note(api_url=self._api_url)
            # Restarted on another port, because its own was taken: workers have the old address.
            if before is not None:
                for worker in self._workers:
                    worker.stop()

    def _is_registered(self, api_url: str) -> bool:
        """Return whether the deployments are registered, or all tries are used up."""
        process = self._registration
        if self._registrations_left and (code := process.ended()) is not None:
            self._registrations_left = self._registrations_left - 1 if code else 0
            if code == 0:
                self._log("the deployments are registered")
            else:
                what = f"the deployments could not be registered: {process.last_words()}"
                self._log(f"{what}; tries left: {self._registrations_left}")
                if not self._registrations_left:
                    self._note(problem=what, hint=f"its log is {process.output}")
        if self._registrations_left and process.may_start:
            self._note(state="registering")
            process.start(self._registration_environment(api_url))
        return not self._registrations_left

    def _registration_environment(self, api_url: str) -> dict[str, str]:
        given, webhook = auth(), configured_webhook()
        return {
            **(own_environment() if self._is_own else os.environ),
            **client_environment(self._home, api_url, console_logs=False),
            **({} if given is None else {AUTH: given}),
            **({} if webhook is None else {WEBHOOK: webhook}),
            "NANOCHAT_HOME": str(self._home),
        }

    def _report(self, api_url: str, why: str, *, resume: bool) -> bool:
        """Report lost runs to Prefect; return whether it accepted all of them."""
        for flow_run, until in list(self._lost.items()):
            with contextlib.suppress(OSError, ValueError):  # stays in `_lost`: retried
                if report_lost(api_url, flow_run, why, until=until, resume=resume):
                    self._log(f"run {flow_run}: {why}")
                del self._lost[flow_run]
        return not self._lost

    def _end(self) -> None:
        """End the runs, the workers, what they left, and the server."""
        self._log("stopping")
        if self._record.state != "failed":
            self._note(state="stopping")
        self._registration.kill()
        # Runs before workers: a worker that ends first kills its runs before they have saved.
        self._end_runs()
        for worker in self._workers:
            worker.stop()
        self._wait(lambda: all(w.process.is_over for w in self._workers), SECONDS_TO_STOP)
        for worker in self._workers:
            worker.process.kill()
        # The server ends last: runs and workers report their ends to it.
        if self._lost and (api_url := self._server.look()) is not None:
            why = "the stack was stopped; resumes when a worker starts"
            self._wait(lambda: self._report(api_url, why, resume=True), SECONDS_TO_REPORT)
        # Ranks of a run that was killed still save.
        self._wait(lambda: not leftovers(self._home), SECONDS_TO_SAVE)
        end_leftovers(self._home, seconds=0)
        if self._is_own:
            stop_server(self._home)
        self._note(server=None, workers={}, runs=list(self._lost))
        self._log("stopped")

    def _end_runs(self) -> None:
        """Ask every run to save and end, and wait for it."""
        # A suspended worker takes no other run, and does not kill those that save.
        for worker in self._workers:
            worker.suspend()
        attempts = [attempt for worker in self._workers for attempt in worker.attempts]

        def are_over() -> bool:
            for attempt in attempts:
                attempt.end(0 if self._hurry.is_set() else SECONDS_TO_SAVE)
            return all(attempt.is_over for attempt in attempts)

        if running := sum(not attempt.is_over for attempt in attempts):
            self._log(f"runs that save and end: {running}")
            self._wait(are_over, SECONDS_TO_SAVE + SECONDS_TO_STOP, hurries=False)
        self._lost |= dict.fromkeys([attempt.flow_run for attempt in attempts], time.time())

    def _note(self, **changes: Any) -> None:
        changed = replace(self._record, **changes)
        if changed == self._record and self._is_written:
            return
        self._record, self._is_written = changed, False
        with contextlib.suppress(OSError):  # a full disk is no reason to end runs: retried later
            write_record(self._home, changed)
            self._is_written = True

    def _wait(self, is_done: Callable[[], bool], seconds: float, *, hurries: bool = True) -> None:
        """Wait until `is_done`, for `seconds` at most; return at once on a second stop signal."""
        deadline = time.monotonic() + seconds
        while not is_done() and time.monotonic() < deadline:
            if hurries and self._hurry.is_set():
                return
            time.sleep(0.1)

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


@contextlib.contextmanager
def _only_supervisor(home: Path) -> Generator[None]:
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    # The kernel releases the lock when its process dies, so a killed supervisor leaves none.
    lock = FileLock(home / "prefect" / "supervisor.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ServerError(
            f"{home} has a supervisor already", hint="`nanochat down` stops it"
        ) from None
    with lock:
        yield
