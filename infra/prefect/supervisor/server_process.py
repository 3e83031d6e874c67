"""Keep a home's own Prefect server running, or wait for a shared one."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from infra.prefect.access import ServerError, admission, answers, check_admitted
from infra.prefect.server import Server, did_not_start, find_process, is_healthy, start_server
from infra.prefect.supervisor.managed_process import Backoff
from nanochat_core.runtime.process_start import find_process as find_live

# A server that runs but does not answer is killed. On a busy machine it may be silent for a while,
# and for longer after a restart.
SECONDS_OF_SILENCE = 120.0
SECONDS_TO_COME_BACK = 300.0
# Unanswered questions before a kill: after a suspend of the keeper the clock alone proves nothing.
LOOKS_IN_SILENCE = 8
SECONDS_BETWEEN_QUESTIONS = 10.0
_ANSWER_SECONDS = 5.0


class Silence:
    """The time and the number of questions since a server's last answer."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._looks = 0
        self._asked = time.monotonic()

    @property
    def is_time(self) -> bool:
        """True if it is time to ask a server again that answered the last time."""
        return time.monotonic() - self._asked >= SECONDS_BETWEEN_QUESTIONS

    def note(self, *, answered: bool, limit: float) -> bool:
        """Note the result of a question; return whether the silence exceeds `limit` seconds."""
        now = self._asked = time.monotonic()
        if answered:
            self._began, self._looks = None, 0
            return False
        self._began = now if self._began is None else self._began
        self._looks += 1
        return now - self._began >= limit and self._looks >= LOOKS_IN_SILENCE


class OwnServer:
    """The server of a home, which is restarted on its port when it ends."""

    def __init__(self, home: Path, port: int, *, guarded: bool, say: Callable[[str], None]) -> None:
        self.server: Server | None = None
        self._home = home
        self._port = port
        self._guarded = guarded  # whether a new server requires a password
        self._say = say
        self._pause = Backoff()
        self._silence = Silence()
        self._is_up = False
        self._was_up = False
        self._problem = ""  # logged last, so that it is logged once

    def look(self) -> str | None:
        """Return the API's address while the server is up, else None; restart it if it ended.

        Raises ServerError if it never came up.
        """
        try:
            self._look()
        except ServerError as error:
            # A server that never came up is misconfigured. A later failure, such as a full disk,
            # may pass, and the runs continue meanwhile.
            if not self._was_up:
                raise
            wait = self._pause.ended()
            if str(error) != self._problem:
                self._problem = str(error)
                self._say(f"server: {error}; again in {wait:g} s, and so on")
        return self.server.api_url if self.server and self._is_up else None

    def _look(self) -> None:
        server = find_process(self._home)
        if server is None:
            self._mend()
        elif self._is_up:
            if self._silence.is_time:
                self._listen(server, answered=answers(server.api_url, seconds=_ANSWER_SECONDS))
        elif is_healthy(server):
            check_admitted(server.api_url)
            self._is_up = self._was_up = True
            self._problem = ""
            self._silence = Silence()
            self._say(f"server: process {server.pid} answers at {server.ui_url}")
        elif self._was_up:
            self._listen(server, answered=False)
        self.server = server or self.server

    def _listen(self, server: Server, *, answered: bool) -> None:
        """Kill a server that has been silent for too long; the next `look` starts another."""
        limit = SECONDS_OF_SILENCE if self._is_up else SECONDS_TO_COME_BACK
        if self._silence.note(answered=answered, limit=limit):
            self._say(
                f"server: process {server.pid} has not answered for {limit:g} s; it is killed"
            )
            self._silence = Silence()
            if (process := find_live(server.pid, server.start)) is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _mend(self) -> None:
        if self.server is not None and not self._was_up:
            raise did_not_start(self._home, "ended while starting")
        if self._is_up:
            self._is_up = False
            self._say(f"server: ended; again in {self._pause.ended():g} s")
        if self._pause.is_over:
            self._pause.began()
            port = self.server.port if self.server else self._port
            self.server = start_server(self._home, port=port, guarded=self._guarded)
            self._silence = Silence()
            self._pause.ended()  # if it does not come up, the next try waits longer


class SharedServer:
    """A server that is operated elsewhere."""

    server: Server | None = None

    def __init__(self, api_url: str, *, say: Callable[[str], None]) -> None:
        self._api_url = api_url
        self._say = say
        self._was_up = False

    def look(self) -> str | None:
        """Return the API's address once it has answered, else None. Raises if it refuses us."""
        if not self._was_up and admission(self._api_url) != "silent":
            check_admitted(self._api_url)
            self._was_up = True
            self._say(f"server: {self._api_url} answers")
        return self._api_url if self._was_up else None
