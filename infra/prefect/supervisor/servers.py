"""The local Prefect server of a stack, which is kept running."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from infra.prefect.access import ServerError
from infra.prefect.records import Server, find_process_of_server
from infra.prefect.server import is_healthy, start_server
from infra.prefect.supervisor.processes import Backoff, Interval

# A server that runs but does not answer is killed: after so many questions in a row, which also
# holds after a suspend of the supervisor. On a busy machine a server is silent while it starts.
SECONDS_BETWEEN_QUESTIONS = 20.0  # with a request of RunWatch, each until its timeout
MAX_UNANSWERED = 12  # 4 minutes


class OwnServer:
    """The server of a home, which is restarted on its port when it ends."""

    def __init__(self, home: Path, port: int, *, guarded: bool, log: Callable[[str], None]) -> None:
        self._home = home
        self._port = port
        self._guarded = guarded  # whether a new server requires a password
        self._log = log
        self._pause = Backoff()
        self._questions = Interval(SECONDS_BETWEEN_QUESTIONS)
        self._unanswered = 0  # questions in a row
        self._is_up = False

    def start(self) -> Server:
        """Return the home's server, started unless it runs. Raises ServerError."""
        server = start_server(self._home, port=self._port, guarded=self._guarded)
        self._port = server.port
        return server

    def poll(self) -> str | None:
        """Return the API's address while the server is up, else None; restart it if it ended."""
        server = find_process_of_server(self._home)
        if server is None:
            self._restart()
        else:
            self._check(server)
        return server.api_url if server is not None and self._is_up else None

    def _check(self, server: Server) -> None:
        """Ask whether the server answers; kill one that has been silent for too long."""
        is_due = self._questions.begins()
        if self._is_up and not is_due:
            return
        if is_healthy(server):
            self._unanswered = 0
            if not self._is_up:
                self._is_up = True
                self._log(f"server: process {server.pid} answers at {server.ui_url}")
        elif is_due:
            self._unanswered += 1
            if self._unanswered >= MAX_UNANSWERED:
                self._log(
                    f"server: process {server.pid} left {self._unanswered} questions unanswered; "
                    "it is killed"
                )
                if (process := server.process) is not None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    def _restart(self) -> None:
        if self._is_up:
            self._is_up = False
            self._log(f"server: ended; again in {self._pause.ended():g} s")
        if not self._pause.is_over:
            return
        self._pause.began()
        self._unanswered = 0
        try:
            self.start()
        except ServerError as error:  # a full disk, for example: runs continue meanwhile
            self._log(f"server: {error}; again in {self._pause.ended():g} s")
        else:
            self._pause.ended()  # if it does not come up, the next try waits longer
