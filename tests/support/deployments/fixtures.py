"""A Prefect server that was told everything."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.prefect.records import Server
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.pools import client


@pytest.fixture
def api(server: Server) -> Iterator[PrefectApi]:
    """The server's API."""
    with client() as asking:
        yield PrefectApi(asking)


@pytest.fixture(scope="session")
def deploy(server: Server) -> Callable[..., Any]:
    """Tells the server everything, again and again; what a test deletes, it has told once more."""
    from deployments.deploy import deploy_all

    deploy_all()
    return deploy_all


@pytest.fixture
def posted() -> Iterator[tuple[str, list[Any]]]:
    """An address, and what was posted to it."""
    bodies: list[Any] = []

    class Keeps(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"]))
            bodies.append((self.headers["content-type"], json.loads(text)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Keeps)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    thread.join()
    server.server_close()
