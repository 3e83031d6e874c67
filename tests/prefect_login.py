"""How a test's HTTP client logs in to Prefect: the password, and a token for each change."""

import uuid
from collections.abc import Generator
from typing import Any

import httpx

from infra.prefect.access import auth
from infra.prefect.records import Server

CHANGES = ("POST", "PUT", "PATCH", "DELETE")


class Login(httpx.Auth):
    """Basic authentication with CSRF protection, as Prefect's pages do it."""

    requires_response_body = True

    @classmethod
    def to(cls, server: Server) -> "Login":
        """With the password that this process uses since it started the server."""
        password = auth()
        assert password is not None, "the server was started by another process"
        return cls(server.api_url, password)

    def __init__(self, api_url: str, password: str) -> None:
        self._api_url = api_url.rstrip("/")
        self._basic = httpx.BasicAuth(*password.split(":", 1))
        self._client = uuid.uuid4().hex
        self._token: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """Send the request with the password, and with a token if it changes something."""
        if request.method in CHANGES and self._token is None:
            asked = httpx.Request("GET", f"{self._api_url}/csrf-token?client={self._client}")
            answer: Any = yield next(self._basic.auth_flow(asked))
            self._token = answer.json()["token"] if answer.status_code == 200 else ""
        if self._token:
            request.headers["Prefect-Csrf-Token"] = self._token
            request.headers["Prefect-Csrf-Client"] = self._client
        answer = yield next(self._basic.auth_flow(request))
        if answer.status_code == 403:
            self._token = None  # it lives for an hour, or the server has another history
