"""The supervisor ("keeper") of a home: it runs the Prefect server and a worker for each pool.

It restarts each of them when it ends, reports the lost runs of a dead worker to Prefect at once,
and ends everything on request: first the runs, which save, then the workers, then the server. If
the keeper itself is killed, the kernel ends the workers; the server stays for its clients, and the
next keeper finds it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from infra.prefect.access import AUTH, ServerError, auth, configured_api_url
from infra.prefect.logs import cut_short
from infra.prefect.server import client_environment, own_environment, stop_server
from infra.prefect.supervisor.managed_process import ManagedProcess
from infra.prefect.supervisor.prefect_worker import PrefectWorker
from infra.prefect.supervisor.processes import (
    SECONDS_TO_SAVE,
    Orphans,
    become_subreaper,
    end_leftovers,
)
from infra.prefect.supervisor.resuming import Resuming
from infra.prefect.supervisor.runs import report_lost
from infra.prefect.supervisor.server_process import OwnServer, SharedServer
from infra.prefect.supervisor.workers import Pool
from infra.prefect.supervisor_record import Stack, my_stack, runs_of_last
from infra.prefect.webhook import WEBHOOK, configured_webhook

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_STOP = 10.0  # a worker without runs
SECONDS_TO_REPORT = 15.0  # lost runs to Prefect, when the stack stops
REGISTRATIONS = 3  # tries to register the deployments
SECONDS_BETWEEN_CUTS = 60.0  # of logs that grow


@dataclass(frozen=True, kw_only=True)
class SupervisorSpec:
    """The options of a keeper."""

    home: Path
    port: int  # of the server, or the next free one
    pools: tuple[Pool, ...]
    store: str | None = None  # of the runs; None: what the environment names
    register: tuple[str, ...] = ()  # the command that registers the deployments
    guarded: bool = True  # whether a new server requires a password


class Supervisor:
    """The keeper; see the module. All processes are started, checked and ended in the main thread.

    The kernel ends a worker when the thread that started it ends (PR_SET_PDEATHSIG).
    """

    def __init__(self, wanted: SupervisorSpec, *, say: Callable[[str], None]) -> None:
        self._home = wanted.home
        self._say = say
        self._stop = threading.Event()
        self._hurry = threading.Event()  # asked to stop a second time
        self._record = my_stack()
        self._logs_seen = time.monotonic()
        self._is_written = True  # False if the last write of the record failed
        self._api_url: str | None = None  # while the server is up
        shared = configured_api_url()
        self._is_own = shared is None
        self._serving = (
            OwnServer(wanted.home, wanted.port, guarded=wanted.guarded, say=say)
            if shared is None
            else SharedServer(shared, say=say)
        )
        log = wanted.home / "prefect" / "register.log"
        self._registration = ManagedProcess("registration", list(wanted.register), log=log)
        self._registrations_left = REGISTRATIONS if wanted.register else 0
        self._workers = [
            PrefectWorker(pool, wanted.home, wanted.store, say=say) for pool in wanted.pools
        ]
        self._adopted = Orphans()
        self._resuming = Resuming(say=say)
        # Flow run id -> unix seconds: lost runs that Prefect does not know of yet. A run that began
        # later than that has been resumed elsewhere.
        self._lost: dict[str, float] = {}

    def run(self) -> None:
        """Keep everything running until SIGTERM or Ctrl-C; return when all of it has ended.

        Raises ServerError if the server cannot be started at all, or the home has a keeper.
        """
        with _only_keeper(self._home), self._until_signalled():
            # Before the first worker starts, so that its orphans come to us and not to init.
            become_subreaper()
            # Read before the record is overwritten: runs that an earlier, killed keeper left.
            self._lost = dict.fromkeys(*runs_of_last(self._home))
            self._record.write(self._home)
            try:
                # Of an earlier, killed keeper: its runs' processes may still hold the GPUs.
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
            if self._is_own:
                self._resuming.look(self._api_url)
            if self._record.state != "ready":
                self._look_whether_ready(self._api_url)
        self._adopted.look(but=self._mine())
        self._look_at_logs()
        self._note(
            workers={w.pool.name: w.child.pid for w in self._workers if w.child.pid is not None},
            runs=(*self._lost, *(a.flow_run for w in self._workers for a in w.attempts)),
        )

    def _look_at_server(self) -> None:
        before, self._api_url = self._record.api_url, self._serving.look()
        if (server := self._serving.server) is not None:
            self._note(server=server.pid, ui_url=server.ui_url, database=server.database)
        if self._api_url is not None and self._api_url != before:
            self._note(
                api_url=self._api_url,
                ui_url=self._record.ui_url or self._api_url.removesuffix("/api"),
            )
            # Restarted on another port, because its own was taken: workers have the old address.
            if before is not None:
                for worker in self._workers:
                    worker.stop()

    def _look_at_logs(self) -> None:
        now = time.monotonic()
        if now - self._logs_seen >= SECONDS_BETWEEN_CUTS:
            self._logs_seen = now
            for log in (self._home / "prefect").glob("*.log"):
                cut_short(log)

    def _is_registered(self, api_url: str) -> bool:
        """Return whether the deployments are registered, or all tries are used up."""
        child = self._registration
        if not self._registrations_left or not child.is_over:
            return not self._registrations_left
        if (code := child.ended()) is not None:
            self._registrations_left = 0 if code == 0 else self._registrations_left - 1
            if code == 0:
                self._say("the deployments are registered")
                return True
            what = f"the deployments could not be registered: {child.last_words()}"
            self._say(f"{what}; tries left: {self._registrations_left}")
            child.pause.ended()
            if not self._registrations_left:
                self._note(problem=what, hint=f"its log is {child.log}")
        elif child.pause.is_over:
            self._note(state="registering")
            child.start(self._registration_environment(api_url))
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

    def _look_whether_ready(self, api_url: str) -> None:
        if all(worker.is_ready(api_url) for worker in self._workers):
            self._say("ready")
            self._note(state="ready")

    def _report(self, api_url: str, why: str, *, resume: bool) -> None:
        """Report lost runs to Prefect; those that it did not accept stay for the next look."""
        for flow_run, until in list(self._lost.items()):
            if report_lost(api_url, flow_run, why, until=until, resume=resume):
                self._say(f"run {flow_run}: {why}")
                del self._lost[flow_run]

    def _end(self) -> None:
        """End the runs, the workers, their orphans, and the server."""
        self._say("stopping")
        if self._record.state != "failed":
            self._note(state="stopping")
        self._registration.kill()
        # Runs before workers: a worker that ends first kills its runs before they have saved.
        self._end_runs()
        for worker in self._workers:
            worker.stop()
        self._wait(lambda: all(w.child.is_over for w in self._workers), SECONDS_TO_STOP)
        for worker in self._workers:
            worker.child.kill()
        # The server ends last: runs and workers report their ends to it.
        if self._lost and (api_url := self._serving.look()) is not None:
            self._wait(lambda: self._all_reported(api_url), SECONDS_TO_REPORT)
        self._wait(lambda: not self._adopted.look(but=self._mine()), SECONDS_TO_SAVE)
        end_leftovers(self._home, seconds=0)
        if self._is_own:
            stop_server(self._home)
        self._note(server=None, workers={}, runs=tuple(self._lost))
        self._say("stopped")

    def _end_runs(self) -> None:
        """Ask every run to save and end, and wait for it."""
        # A suspended worker takes no other run, and does not kill those that save.
        for worker in self._workers:
            worker.hold()
        attempts = [attempt for worker in self._workers for attempt in worker.attempts]

        def are_over() -> bool:
            for attempt in attempts:
                attempt.end(0 if self._hurry.is_set() else SECONDS_TO_SAVE)
            return all(attempt.is_over for attempt in attempts)

        if attempts:
            self._say(f"runs that save and end: {len(attempts)}")
            self._wait(are_over, SECONDS_TO_SAVE + SECONDS_TO_STOP, hurries=False)
        self._lost |= dict.fromkeys([attempt.flow_run for attempt in attempts], time.time())

    def _all_reported(self, api_url: str) -> bool:
        self._report(api_url, "the stack was stopped; resumes when a worker starts", resume=True)
        return not self._lost

    def _mine(self) -> set[int | None]:
        """Return the pids of children that are not orphans."""
        children = [self._registration, *(worker.child for worker in self._workers)]
        return {self._record.server, *(child.pid for child in children)}

    def _note(self, **changes: Any) -> None:
        changed: Stack = replace(self._record, **changes)
        if changed == self._record and self._is_written:
            return
        self._record, self._is_written = changed, False
        with contextlib.suppress(OSError):  # a full disk is no reason to end runs: retried later
            changed.write(self._home)
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
def _only_keeper(home: Path) -> Generator[None]:
    (home / "prefect").mkdir(parents=True, exist_ok=True)
    # The kernel releases the lock when its process dies, so a killed keeper leaves none.
    lock = FileLock(home / "prefect" / "keeper.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ServerError(f"{home} has a keeper already", hint="`nanochat down` stops it") from None
    with lock:
        yield
