"""The supervisor of a home, `nanochat up`: it runs the Prefect server and a worker for each pool.

It restarts each of them when it ends, resumes crashed runs (runs.py), and ends everything on
request: first the runs, which save, then the workers, then the server. If the supervisor itself is
killed, the kernel ends the workers; the server stays for its clients, and the next supervisor finds
it.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import FrameType

import psutil

from infra.polling import ASK_SECONDS, POLL_SECONDS, SLOW_SECONDS
from infra.prefect.access import (
    WEBHOOK,
    ServerError,
    check_admitted,
    configured_api_url,
    configured_webhook,
)
from infra.prefect.logs import last_line, rotate, spawn
from infra.prefect.records import find_process_of_server, supervisor_lock
from infra.prefect.server import (
    SECONDS_TO_START,
    client_environment,
    own_environment,
    stop_server,
    wait_for_server,
)
from infra.prefect.supervisor.processes import Interval, end_workers
from infra.prefect.supervisor.runs import RunWatch
from infra.prefect.supervisor.servers import OwnServer
from infra.prefect.supervisor.workers import is_polling, managed_worker, worker_environment
from infra.retry import FIRST_PAUSE, TRIES, RetryPolicy, until_answered
from infra.storage.files import try_flock, writing
from nanochat_core.runtime.process_start import this_process

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
        self._register = register
        self._log = log
        self._stop = threading.Event()
        self._hurry = threading.Event()  # asked to stop a second time
        self._shared = configured_api_url()
        self._server = OwnServer(home, port, guarded=guarded, log=log)
        # A server that a run uses outlives a start that fails.
        self._keeps_server = self._shared is not None or find_process_of_server(home) is not None
        self._api_url: str | None = None  # the last one
        self._workers = {pool: managed_worker(pool, home, log=log) for pool in pools}
        self._runs = RunWatch(log, is_own=self._shared is None)
        self._chores = Interval(SLOW_SECONDS)

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Supervise everything until SIGTERM or Ctrl-C; return when all of it has ended.

        `on_ready` gets the API's address once the workers poll for runs. Raises ServerError if the
        server, the registration or a worker cannot be started at all.
        """
        with self._until_signalled():
            try:
                api_url = self._start()
                if not self._stop.is_set():
                    self._keeps_server = self._shared is not None
                    on_ready(api_url)
                while not self._stop.wait(ASK_SECONDS):
                    self._poll()
            finally:
                self._end()

    def _start(self) -> str:
        """Start the server, register, start the workers; return the API's address.

        Returns early if a signal came.
        """
        if self._shared is None:
            server = self._server.start()
            wait_for_server(self._home, server, stop=self._stop.is_set)
            api_url = server.api_url
        else:
            api_url = self._shared
        if self._stop.is_set():
            return api_url
        check_admitted(api_url)  # raises if it refuses our password
        if self._register:
            # Workers start afterwards: of simultaneous writers SQLite lets some fail.
            policy = RetryPolicy(tries=TRIES, first_wait=FIRST_PAUSE, longest_wait=FIRST_PAUSE)
            until_answered(
                lambda: self._run_registration(api_url),
                ServerError,
                policy=policy,
                wait=self._stop.wait,
            )
        until = time.monotonic() + SECONDS_TO_START
        while not (self._stop.is_set() or self._are_polling(api_url)):
            self._poll()
            if time.monotonic() > until:
                raise ServerError(
                    f"server and workers are not up after {SECONDS_TO_START:g} s",
                    hint=f"their logs are in {self._home / 'prefect'}",
                )
            for pool, worker in self._workers.items():
                # One that polled before is restarted for ever: a full disk may pass.
                if worker.early_ends >= MAX_EARLY_ENDS:
                    raise ServerError(
                        f"the worker of {pool} ended {worker.early_ends} times while starting: "
                        f"{last_line(worker.output)}",
                        hint=f"its log is {worker.output}",
                    )
            self._stop.wait(ASK_SECONDS)
        return api_url

    def _poll(self) -> None:
        """Check everything once and restart what ended. Never blocks on a process."""
        for worker in self._workers.values():
            worker.ended()
        api_url = self._server.poll() if self._shared is None else self._shared
        if api_url is not None:
            # Restarted on another port, because its own was taken: workers have the old address.
            if self._api_url not in (None, api_url):
                end_workers(self._worker_processes())
            self._api_url = api_url
            for worker in self._workers.values():
                if worker.may_start:
                    worker.start(worker_environment(self._home, api_url, store=self._store))
        if self._chores.begins():
            if api_url is not None:
                self._runs.poll(api_url)
            for path in (self._home / "prefect").glob("*.log"):
                rotate(path)

    def _are_polling(self, api_url: str) -> bool:
        """Return whether all workers poll for runs."""
        return all(
            not worker.is_over and is_polling(api_url, pool, since=worker.since)
            for pool, worker in self._workers.items()
        )

    def _run_registration(self, api_url: str) -> None:
        """Register the deployments in a process of its own. Raises ServerError if it fails."""
        webhook, log = configured_webhook(), self._home / "prefect" / "register.log"
        environment = {
            **own_environment(),
            **client_environment(self._home, api_url, console_logs=False),
            **({} if webhook is None else {WEBHOOK: webhook}),
            "NANOCHAT_HOME": str(self._home),
        }
        # In the log's directory: packages of the caller's may have the names of ours.
        with spawn(self._register, log=log, environment=environment, cwd=log.parent) as process:
            while process.poll() is None and not self._stop.wait(POLL_SECONDS):
                pass
            if self._stop.is_set():
                process.kill()
            elif process.returncode != 0:
                raise ServerError(
                    f"the deployments could not be registered: {last_line(log)}",
                    hint=f"its log is {log}",
                )

    def _end(self) -> None:
        """End the runs, the workers and the server."""
        self._log("stopping")
        end_workers(self._worker_processes(), is_urgent=self._hurry.is_set)
        # The server ends last: runs and workers report their ends to it.
        if not self._keeps_server:
            stop_server(self._home)
        self._log("stopped")

    def _worker_processes(self) -> list[psutil.Process]:
        return [psutil.Process(w.pid) for w in self._workers.values() if w.pid and not w.is_over]

    @contextlib.contextmanager
    def _until_signalled(self) -> Generator[None]:
        """Set `_stop` on SIGTERM, Ctrl-C and a closed terminal, `_hurry` on another Ctrl-C.

        `nanochat down` after a Ctrl-C, and a terminal that closes then, still let runs save.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._stop.is_set() and number == signal.SIGINT:
                self._hurry.set()
            self._stop.set()

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def supervising(home: Path) -> Generator[bool]:
    """Yield whether this process may supervise the home, while the block runs: one process may.

    The kernel releases the lock when the process dies. Raises ServerError if it cannot be written.
    """
    path = supervisor_lock(home)
    with writing(path, ServerError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = path.open("a")
    with file:
        if is_ours := try_flock(file):
            this_process().write(file)
        try:
            yield is_ours
        finally:
            if is_ours:
                file.truncate(0)
