"""What `nanochat up` says first of a shared server that was not told of us.

The server here is a small one that knows some paths of Prefect's API.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from flows.cli.machine.up import (
    _what_is_missing,  # pyright: ignore[reportPrivateUsage]
)
from infra.prefect.supervisor.control import unknown_to

FLOW = "/api/deployments/name/nanochat/nanochat"
POOLS = ("/api/work_pools/cpu", "/api/work_pools/gpu")


class Known(BaseHTTPRequestHandler):
    """Knows the paths that its class is given."""

    paths: ClassVar[set[str]] = set()
    otherwise = 404

    def do_GET(self) -> None:
        self.send_response(200 if self.path in self.paths else self.otherwise)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def api_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("NANOCHAT_PREFECT_AUTH", raising=False)
    monkeypatch.setattr(Known, "paths", {FLOW, *POOLS})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Known)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_knows_every_variable_is_not_mentioned(api_url: str) -> None:
    assert unknown_to(api_url, ["cpu", "gpu"]) == []
    assert _what_is_missing(("cpu", "gpu")) is None


def test_what_a_server_does_not_know_is_one_line_with_the_command(api_url: str) -> None:
    Known.paths = {POOLS[0]}

    assert _what_is_missing(("cpu", "gpu")) == (
        f"{api_url} does not know the pool gpu, our deployments; register them with "
        "`nanochat up --register`"
    )


def test_the_command_names_pools_that_are_not_among_ours(api_url: str) -> None:
    said = _what_is_missing(("gpu", "h100"))

    assert said is not None
    assert "the pool h100;" in said
    assert "`nanochat up --register --pool h100`" in said


@pytest.mark.parametrize("code", [401, 500])
def test_a_server_that_does_not_tell_is_not_said_to_know_nothing(
    api_url: str, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Known, "paths", {FLOW})
    monkeypatch.setattr(Known, "otherwise", code)

    assert unknown_to(api_url, ["gpu"]) == []


def test_a_local_server_is_not_checked(api_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Known.paths = set()
    monkeypatch.delenv("PREFECT_API_URL")

    assert _what_is_missing(("cpu", "gpu")) is None
