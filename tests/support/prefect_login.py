"""How a test's HTTP client logs in to Prefect, and asks again while SQLite is busy."""

import time
import uuid
from collections.abc import Callable, Generator
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

SECONDS = 60.0  # on SQLite a busy server says now and then that it has no time
CHANGES = ("POST", "PUT", "PATCH", "DELETE")
_Answer = TypeVar("_Answer")


def retry_if_busy(ask: Callable[[], _Answer]) -> _Answer:
    """Return what our own client is answered, asked again while the server is busy."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return ask()
        except httpx.HTTPStatusError as error:
            if (
                error.response.status_code != HTTPStatus.SERVICE_UNAVAILABLE
                or time.monotonic() > deadline
            ):
                raise
            time.sleep(0.1)


class Login(httpx.Auth):
    """Basic authentication with CSRF protection, as Prefect's pages do it, and their retries."""

    requires_response_body = True

    def __init__(self, api_url: str, password: str) -> None:
        self._api_url = api_url.rstrip("/")
        self._basic = httpx.BasicAuth(*password.split(":", 1))
        self._client = uuid.uuid4().hex
        self._token: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """Send the request with the password, and with a token if it changes something.

        It is sent again while the server is busy, as Prefect's own client does.
        """
        if request.method in CHANGES and self._token is None:
            asked = httpx.Request("GET", f"{self._api_url}/csrf-token?client={self._client}")
            answer: Any = yield from self._send(asked)
            self._token = answer.json()["token"] if answer.status_code == 200 else ""
        if self._token:
            request.headers["Prefect-Csrf-Token"] = self._token
            request.headers["Prefect-Csrf-Client"] = self._client
        answer = yield from self._send(request)
        if answer.status_code == 403:
            self._token = None  # it lives for an hour, or the server has another history

    def _send(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, httpx.Response]:
        deadline = time.monotonic() + SECONDS
        while True:
            answer = yield next(self._basic.auth_flow(request))
            if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                return answer
            time.sleep(0.1)
