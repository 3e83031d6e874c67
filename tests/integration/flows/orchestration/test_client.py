"""The client that asks once: what it raises, how soon, and what it reports of a refusal."""

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from infra.prefect.server import Server
from nanochat_core.errors import ConfigError
from tests.support.flows.pools import client as patient_client

pytestmark = pytest.mark.prefect


@pytest.fixture
def refuse(server: Server) -> Iterator[Callable[[int, bytes], str]]:
    """Starts servers that answer everything with one status and body."""
    made: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Refusing(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the token against forgery, which ours does not know
                self.send_response(422)
                body = b'{"detail": "CSRF protection is disabled."}'
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        made.append(HTTPServer(("127.0.0.1", 0), Refusing))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_port}/api"

    yield start
    for each in made:
        each.shutdown()
        each.server_close()


def ask(api_url: str) -> Any:
    """One request to another server."""
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    from flows.orchestration.client import quick_client

    settings: Any = {PREFECT_API_URL: api_url, PREFECT_CLIENT_MAX_RETRIES: 8}
    with temporary_settings(settings), quick_client() as client:
        return client.read_flow_runs(limit=1)


def test_a_dead_port_is_reported_within_seconds_where_the_contexts_client_would_ask_for_minutes(
    server,
):
    import httpx
    from prefect.context import SyncClientContext

    with socket.socket() as unused, SyncClientContext.get_or_create() as context:
        unused.bind(("127.0.0.1", 0))
        context.client.read_flow_runs(limit=1)  # connected once, it would ask again
        with pytest.raises(httpx.ConnectError):
            ask(f"http://127.0.0.1:{unused.getsockname()[1]}/api")


def test_a_server_that_stands_still_is_reported_too(server, monkeypatch):
    import httpx

    from flows.orchestration import client as module

    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    with socket.socket() as still:
        still.bind(("127.0.0.1", 0))
        still.listen()
        with pytest.raises(httpx.ReadTimeout):
            ask(f"http://127.0.0.1:{still.getsockname()[1]}/api")


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "PREFECT_API_AUTH_STRING"), (409, "up --register"), (422, "--register")],
)
def test_a_refusal_is_a_persons_to_mend(refuse, status, hint):
    api_url = refuse(status, b'{"detail": "no such\\nfield"}')
    with pytest.raises(ConfigError) as caught:
        ask(api_url)
    assert str(caught.value) == f"Prefect refuses ({status}): no such field"
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overloaded_server_does_not_refuse(refuse, status):
    import httpx

    api_url = refuse(status, b"slow down")
    with pytest.raises(httpx.HTTPStatusError):
        ask(api_url)


def test_the_settings_of_others_stay_as_they_were(server):
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    from flows.orchestration.client import quick_client

    before = PREFECT_CLIENT_MAX_RETRIES.value()
    with quick_client() as client:
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
        assert client is not patient_client()
    assert PREFECT_CLIENT_MAX_RETRIES.value() == before
