"""Passwords and addresses of the Prefect server and its database: read, shown, tried out."""

import base64
import os
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from infra.prefect import access
from infra.prefect.access import NO_ANSWER, ServerError, client, is_prefect
from tests.support.serving import QuietHandler, serving

USER = "nanochat:secret"


class Guarded(QuietHandler):
    """Answers as Prefect does with a password: the health check to all, the rest to some."""

    def do_GET(self) -> None:
        wanted = f"Basic {base64.b64encode(USER.encode()).decode()}"
        is_open = self.path == "/api/health" or self.headers["Authorization"] == wanted
        self.reply(200 if is_open else 401, b"true")


@pytest.fixture
def guarded() -> Iterator[str]:
    """The API's address of a server with a password."""
    with serving(Guarded) as port:
        yield f"http://127.0.0.1:{port}/api"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test makes a client of its own environment, which the client changes."""
    monkeypatch.delenv(access.AUTH, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    client.cache_clear()
    yield
    client.cache_clear()


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy"])
def test_a_server_elsewhere_is_asked_through_a_proxy(
    variable: str, guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", USER)
    monkeypatch.setenv(variable, guarded.removesuffix("/api"))
    assert is_prefect("http://prefect.example.org/api")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "https_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("proxy", ["http", "https", "socks5", "socks5h"])
def test_the_local_server_is_reached_whatever_the_proxy_is(
    proxy: str, variable: str, guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, f"{proxy}://127.0.0.1:9")

    with pytest.raises(ServerError, match="asks for a password"):
        is_prefect(guarded)

    with httpx.Client() as prefects:  # as Prefect makes its own
        assert prefects.get(f"{guarded}/health").json() is True


@pytest.mark.parametrize("given", ["NO_PROXY", "no_proxy"])
@pytest.mark.parametrize(
    ("value", "wanted"), [("example.org", "example.org,127.0.0.1,localhost"), ("*", "*")]
)
def test_a_proxy_is_never_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: str, value: str, wanted: str
) -> None:
    monkeypatch.setenv(given, value)
    client()
    # Where both are set, Python reads the lower one.
    assert [os.environ[name] for name in ("NO_PROXY", "no_proxy")] == [wanted, wanted]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks4://127.0.0.1:9"),
        ("HTTPS_PROXY", "gopher://127.0.0.1:9"),
        ("http_proxy", "http://[::bad"),
        ("all_proxy", "http://127.0.0.1:port"),
        ("no_proxy", "http://[::bad"),
        ("SSL_CERT_FILE", "/proc/absent"),
    ],
)
def test_an_environment_that_no_client_can_use_is_one_line_with_a_hint(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ServerError, match="Prefect's client cannot be made: ") as caught:
        is_prefect("http://127.0.0.1:1/api")

    assert variable.upper() in (caught.value.hint or "")


def test_the_right_password_no_password_and_a_wrong_one_are_distinguished(
    guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match="asks for a password") as caught:
        is_prefect(guarded)
    assert "PREFECT_API_AUTH_STRING" in (caught.value.hint or "")

    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "nanochat:guess")
    with pytest.raises(ServerError, match="refuses PREFECT_API_AUTH_STRING") as caught:
        is_prefect(guarded)
    assert "guess" not in f"{caught.value} {caught.value.hint}"
    assert not is_prefect("http://127.0.0.1:1/api")  # no answer is no refusal

    monkeypatch.setenv("PREFECT_API_AUTH_STRING", USER)
    assert is_prefect(guarded)


@pytest.mark.parametrize("status", [200, 302, 404, 422])
def test_another_program_is_no_prefect_server_and_gets_no_password(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    class Another(QuietHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.reply(status, b"{}")

    monkeypatch.setenv("PREFECT_API_AUTH_STRING", USER)
    with serving(Another) as port:
        assert not is_prefect(f"http://127.0.0.1:{port}/api")
    assert seen == [None]


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"]
)
def test_what_is_no_answer_or_half_of_one_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        assert not is_prefect(url)
        with pytest.raises(NO_ANSWER):
            access.ask(url, "/admin/version")
        thread.join()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/api", "http://127.0.0.1:42o0/api"])
def test_a_shared_server_must_answer(url: str) -> None:
    with pytest.raises(ServerError, match=f"no Prefect server answers at {url}"):
        access.check_answers(url)
