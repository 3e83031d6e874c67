"""The server's part of the stack: one of this home that is kept running, or a shared one."""

from collections.abc import Callable
from pathlib import Path

from infra.prefect_access import admission, check_admitted
from infra.prefect_server import Server, did_not_start, find_process, is_healthy, start_server
from infra.stack.child import Pause


class OwnServer:
    """The server of a home: found or started, and started again where it was when it dies."""

    def __init__(self, home: Path, port: int, *, say: Callable[[str], None]) -> None:
        self.server: Server | None = None
        self._home = home
        self._port = port
        self._say = say
        self._pause = Pause()
        self._is_up = False
        self._was_up = False

    def look(self) -> str | None:
        """The API's address while the server is up; None while it is not.

        Raises ServerError when it never came up: then it is not an accident.
        """
        server = find_process(self._home)
        if server is None:
            self._mend()
        elif not self._is_up and is_healthy(server):
            check_admitted(server.api_url)
            self._is_up = self._was_up = True
            self._say(f"server: process {server.pid} answers at {server.ui_url}")
        self.server = server or self.server
        return self.server.api_url if self.server and self._is_up else None

    def _mend(self) -> None:
        if self.server is not None and not self._was_up:
            raise did_not_start(self._home, "ended while starting")
        if self._is_up:
            self._is_up = False
            self._say(f"server: ended; again in {self._pause.ended():g} s")
        if self._pause.is_over:
            self._pause.began()
            port = self.server.port if self.server else self._port
            self.server = start_server(self._home, port=port)
            self._pause.ended()  # should it not come up, the next try waits longer


class SharedServer:
    """A server that others keep."""

    server: Server | None = None

    def __init__(self, api_url: str, *, say: Callable[[str], None]) -> None:
        self._api_url = api_url
        self._say = say
        self._was_up = False

    def look(self) -> str | None:
        """The API's address once it has answered; None before. Raises ServerError when refused."""
        if not self._was_up and admission(self._api_url) != "silent":
            check_admitted(self._api_url)
            self._was_up = True
            self._say(f"server: {self._api_url} answers")
        return self._api_url if self._was_up else None
