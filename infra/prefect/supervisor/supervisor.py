"""The supervisor of a home, `nanochat up`: it runs the Prefect server and a worker for each pool.

Every few seconds it starts again what has ended and resumes crashed runs (runs.py), until it is
asked to end: then runs save, and the server ends last. If the supervisor itself is killed, the
kernel ends the workers, whose runs save; the server stays for its clients, and the next supervisor
finds it.
"""

import contextlib
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FrameType

import psutil

from infra.polling import SLOW_SECONDS, wait_until
from infra.prefect.access import WEBHOOK, ServerError, check_answers, configured_webhook
from infra.prefect.logs import last_line, spawn
from infra.prefect.server import (
    PORTS,
    client_environment,
    find_server,
    own_environment,
    shared_server,
    start_server,
    stop_server,
    supervisor_lock,
    wait_for_server,
)
from infra.prefect.supervisor.runs import RunWatch
from infra.prefect.supervisor.workers import worker_command, worker_environment
from infra.storage.files import try_flock, writing
from nanochat_core.runtime.process_start import start_of, this_process

SECONDS_TO_SAVE = 30.0  # a stage needs less to save and to publish its checkpoint


@dataclass
class Supervisor:
    """See the module. All processes are started, checked and ended in the main thread.

    The kernel ends a worker when the thread that started it ends (PR_SET_PDEATHSIG).
    """

    home: Path
    _: KW_ONLY
    ports: Sequence[int] = PORTS  # of the server: the first free one
    pools: Sequence[str]
    store: str | None  # of the runs; None means the one that the environment names
    register: Sequence[str]  # the command that registers the deployments; empty for none
    guarded: bool  # whether a new server requires a password
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._shared = shared_server(self.home)
        self._logged: dict[str, str] = {}  # process -> the last line about it
        self._workers: dict[str, subprocess.Popen[bytes] | None] = dict.fromkeys(self.pools)

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Supervise everything until SIGTERM or Ctrl-C; return when all of it has ended.

        `on_ready` gets the API's address once the workers are started. Raises ServerError if the
        server cannot be started, or the deployments cannot be registered.
        """
        # A server that a run uses outlives a start that fails.
        keeps_server = self._shared is not None or find_server(self.home) is not None
        with self._until_signalled():
            try:
                api_url = self._start()
                if not self._stop.is_set():
                    self._restart_ended(api_url)
                    keeps_server = self._shared is not None
                    on_ready(api_url)
                watch = RunWatch(self.log, is_own=self._shared is None)
                while not self._stop.wait(SLOW_SECONDS):
                    self._restart_ended(api_url)
                    watch.poll(api_url)
            finally:
                self.log("stopping")
                end_workers(w for w in self._workers.values() if w and w.poll() is None)
                # The server ends last: runs report their ends to it.
                if not keeps_server:
                    stop_server(self.home)
                self.log("stopped")

    def _start(self) -> str:
        """Start the server and register; return the API's address, early if a signal came."""
        if self._shared is not None:
            check_answers(self._shared)
            return self._shared
        server = start_server(self.home, ports=self.ports, guarded=self.guarded)
        # From now on it has this port alone: that is the address which workers have.
        self.ports = [server.port]
        wait_for_server(self.home, server, stop=self._stop.is_set)
        self.log(f"server: process {server.pid} at {server.ui_url}")
        # Workers start afterwards: of simultaneous writers SQLite lets some fail.
        if self.register and not self._stop.is_set():
            self._run_registration(server.api_url)
        return server.api_url

    def _restart_ended(self, api_url: str) -> None:
        """Start the server and the workers that do not run. An error is logged."""
        if self._shared is None and find_server(self.home) is None:
            with self._logging_errors("server"):
                server = start_server(self.home, ports=self.ports, guarded=self.guarded)
                self._log_new("server", f"ended; started again as process {server.pid}")
        for pool, worker in self._workers.items():
            if worker is None or worker.poll() is not None:
                with self._logging_errors(f"worker {pool}"):
                    self._start_worker(pool, api_url)

    @contextlib.contextmanager
    def _logging_errors(self, process: str) -> Generator[None]:
        try:
            yield
        except (ServerError, OSError) as error:  # a full disk, for example; runs continue
            hint = f"; hint: {error.hint}" if isinstance(error, ServerError) and error.hint else ""
            self._log_new(process, f"not started: {error}{hint}")

    def _log_new(self, process: str, line: str) -> None:
        """Log a line about a process unless it is the last one about it, five seconds ago."""
        if self._logged.get(process) != line:
            self.log(f"{process}: {line}")
        self._logged[process] = line

    def _start_worker(self, pool: str, api_url: str) -> None:
        log = self.home / "prefect" / f"worker-{pool}.log"
        if (before := self._workers[pool]) is not None:
            code = before.returncode
            why = f"ended ({code}): {last_line(log)}; its log is {log}"
            self._log_new(f"worker {pool}", why)
        environment = worker_environment(self.home, api_url, store=self.store)
        self._workers[pool] = None
        self._workers[pool] = spawn(worker_command(pool), log=log, environment=environment)

    def _run_registration(self, api_url: str) -> None:
        """Register the deployments in a process of its own, which a signal ends.

        Raises ServerError if it fails.
        """
        webhook, log = configured_webhook(), self.home / "prefect" / "register.log"
        environment = {
            **own_environment(),
            **client_environment(self.home, api_url, console_logs=False),
            **({} if webhook is None else {WEBHOOK: webhook}),
            "NANOCHAT_HOME": str(self.home),
        }
        with spawn(self.register, log=log, environment=environment) as process:
            wait_until(lambda: process.poll() is not None or self._stop.is_set(), seconds=math.inf)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0 and not self._stop.is_set():
            raise ServerError(
                f"the deployments could not be registered: {last_line(log)}",
                hint=f"its log is {log}",
            )

    @contextlib.contextmanager
    def _until_signalled(self) -> Generator[None]:
        """Set `_stop` on SIGTERM, Ctrl-C and a closed terminal.

        Another Ctrl-C ends this process at once; then runs still save, but nothing waits for them,
        and the server stays.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._stop.set()
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def end_workers(workers: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill these workers, so that their runs save and end; kill what does not in time."""
    runs: list[int] = []
    for worker in workers:
        # Stopped before its runs are listed, so that it begins no other. Not SIGTERM: a worker
        # that gets it kills its runs before they have saved.
        worker.send_signal(signal.SIGSTOP)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            runs += [run.pid for run in psutil.Process(worker.pid).children()]
        worker.kill()
        worker.wait()
    living = {pid: start for pid in runs if (start := start_of(pid)) is not None}
    wait_until(
        lambda: all(start_of(pid) != start for pid, start in living.items()),
        seconds=SECONDS_TO_SAVE,
    )
    for pid in living:  # each leads a process group, which may outlive it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


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
        yield is_ours
