"""The local Prefect server of a stack, which is kept running."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil

from infra.prefect.access import ServerError, check_admitted
from infra.prefect.records import Server, find_process_of_server
from infra.prefect.server import did_not_start, is_healthy, start_server
from infra.prefect.supervisor.processes import Backoff, Interval

# A server that runs but does not answer is killed: after so many questions in a row, which also
# holds after a suspend of the supervisor. On a busy machine a server is silent while it starts.
SECONDS_BETWEEN_QUESTIONS = 15.0
MAX_UNANSWERED = 16  # 4 minutes


class OwnServer:
    """The server of a home, which is restarted on its port when it ends."""

    def __init__(self, home: Path, port: int, *, guarded: bool, log: Callable[[str], None]) -> None:
        self._home = home
        self._port = port
        self._guarded = guarded  # whether a new server requires a password
        self._log = log
        self._server: Server | None = None  # the last one
        self._pause = Backoff()
        self._questions = Interval(SECONDS_BETWEEN_QUESTIONS)
        self._unanswered = 0  # questions in a row
        self._is_up: bool | None = None  # None: no server of this stack has ever been up

    def look(self) -> str | None:
        """Return the API's address while the server is up, else None; restart it if it ended.

        Raises ServerError if it never came up.
        """
        try:
            if (server := find_process_of_server(self._home)) is None:
                self._restart()
            else:
                self._check(server)
        except ServerError as error:
            # A server that never came up is misconfigured. A later failure, such as a full disk,
            # may pass, and the runs continue meanwhile.
            if self._is_up is None:
                raise
            self._log(f"server: {error}; again in {self._pause.ended():g} s")
        return self._server.api_url if self._server and self._is_up else None

    def _check(self, server: Server) -> None:
        """Ask whether the server answers; kill one that has been silent for too long."""
        self._server = server
        is_due = self._questions.begins()
        if self._is_up and not is_due:
            return
        if is_healthy(server):
            self._unanswered = 0
            if not self._is_up:
                check_admitted(server.api_url)
                self._is_up = True
                self._log(f"server: process {server.pid} answers at {server.ui_url}")
        elif is_due and self._is_up is not None:
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
        if self._server is not None and self._is_up is None:
            raise did_not_start(self._home, "ended while starting")
        if self._is_up:
            self._is_up = False
            self._log(f"server: ended; again in {self._pause.ended():g} s")
        if self._pause.is_over:
            self._pause.began()
            port = self._server.port if self._server else self._port
            self._server = start_server(self._home, port=port, guarded=self._guarded)
            self._unanswered = 0
            self._pause.ended()  # if it does not come up, the next try waits longer
