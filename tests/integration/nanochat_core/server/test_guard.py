import base64
import contextlib

import httpx
import pytest

from nanochat_core.errors import ConfigError
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.launch import read_keys, trusted_hosts
from tests.support.nanochat_core.server.live import (
    NAME,
    PATIENCE,
    body,
    events_of,
    serving,
    wait_until,
)

KEY, OTHER_KEY = "correct-horse", "battery-staple"
FRIEND = "https://friend.example"
ROUTES = ["/", "/stats", "/metrics", "/openapi.json", "/v1/models", "/nothing"]
GET_WITH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def locked():
    rules = ServerConfig(
        log="none",
        keys=(KEY, OTHER_KEY),
        hosts=trusted_hosts("127.0.0.1", ["chat.example"]),
        origins=(FRIEND,),
    )
    with serving(rules) as server:
        yield server


@pytest.mark.parametrize("path", [*ROUTES, "/chat/completions", "/v1/chat/completions"])
def test_every_route_but_health_needs_the_key(locked, path):
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"})
    with locked.client() as http:
        if "completions" in path:
            answers = [http.post(path, json=body(), headers=h) for h in (*wrong, GET_WITH)]
        else:
            assert [http.head(path, headers=h).status_code for h in wrong] == [401] * 3
            answers = [http.get(path, headers=h) for h in (*wrong, GET_WITH)]
    assert [answer.status_code for answer in answers[:3]] == [401] * 3
    assert all("www-authenticate" in answer.headers for answer in answers[:3])
    assert answers[3].status_code in (200, 404)
    assert locked.get("/health").status_code == 200


def test_a_browser_may_ask_for_the_key_as_a_password(locked):
    given = base64.b64encode(f"anybody:{KEY}".encode()).decode()
    assert locked.get("/", Authorization=f"Basic {given}").status_code == 200
    asked = locked.get("/", Accept="text/html").headers["www-authenticate"]
    assert asked.startswith("Basic ")
    # A page of its own asks for the key in its own way.
    assert "Basic" not in locked.get("/stats").headers["www-authenticate"]


def test_an_openai_refusal_has_openais_form(locked):
    error = locked.get("/v1/models").json()["error"]
    assert error["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("CHAT.example", 200),
        *[(host, 400) for host in ("evil.example", "localhost.evil.example", "")],
    ],
)
def test_only_names_of_this_server_are_answered(locked, host, status):
    answer = locked.get("/health", Host=host)
    assert answer.status_code == status
    assert ("--trusted-host" in answer.text) == (status == 400)


def test_a_public_server_answers_to_any_host_name_unless_given():
    assert trusted_hosts("0.0.0.0", []) == ()
    assert "chat.example" in trusted_hosts("0.0.0.0", ["chat.example"])


def test_only_an_allowed_origin_may_ask_and_with_any_headers(locked, live):
    asked = "authorization,content-type,x-stainless-lang"  # as OpenAI's library in a browser
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    for server, origin in ((locked, FRIEND), (locked, "https://evil.example"), (live, FRIEND)):
        with server.client(headers={"Origin": origin}) as http:
            answer = http.get("/health").headers.get("access-control-allow-origin")
            before = http.options("/v1/chat/completions", headers=wanted)
        is_allowed = (server, origin) == (locked, FRIEND)
        assert answer == (FRIEND if is_allowed else None)
        assert before.headers.get("access-control-allow-origin") == answer
        assert not is_allowed or before.headers["access-control-allow-headers"] == asked


def test_every_response_has_the_security_headers(live):
    for path in ("/", "/health", "/nothing"):
        headers = live.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_foreign_page_may_send_unasked_is_refused(live, kind):
    with live.client() as http:
        sent = http.post("/chat/completions", content=b"{}", headers={"Content-Type": kind})
    assert sent.status_code == 415


@pytest.mark.parametrize(
    "content",
    [lambda: b" " * (2**20 + 1), lambda: (b" " * 100_000 for _ in range(40))],
    ids=["by its length", "while it comes"],
)
def test_a_body_that_is_too_large_is_refused(live, content):
    kind = {"Content-Type": "application/json"}
    with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # it was cut meanwhile
        url = f"{live.url}/chat/completions"
        sent = httpx.post(url, content=content(), headers=kind, timeout=PATIENCE)
        assert sent.status_code == 413
        assert sent.json() == {"detail": "the request is larger than 1048576 bytes"}


def test_a_wrong_route_or_method_is_reported_in_the_apis_form(live):
    assert live.get("/nothing").json() == {"detail": "not found"}
    assert live.get("/v1/nothing").json()["error"]["message"] == "not found"
    assert live.get("/chat/completions").status_code == 405
    assert live.post("/chat/completions/").status_code == 404  # and no redirect


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions", "/v1/completions"])
def test_clients_with_different_keys_share_no_cached_pages(locked, path):
    asked = {"model": NAME, "prompt": "salt"} if path == "/v1/completions" else body("salt")

    def salt(key):
        with locked.client(headers={"Authorization": f"Bearer {key}"}) as http:
            said = http.post(path, json=asked)
        if path == "/chat/completions":
            return "".join(event.get("token", "") for event in events_of(said.text))
        choice = said.json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    assert [salt(key) for key in (KEY, OTHER_KEY, KEY)] == ["0", "1", "0"]


def test_a_key_file_holds_a_word_a_line(tmp_path):
    path = tmp_path / "key"
    path.write_text(" secret-1\n")
    assert read_keys(path) == ("secret-1",)
    path.write_text("secret-1\n\nsecret-2\n")
    assert read_keys(path) == ("secret-1", "secret-2")
    path.write_bytes("secret-1\r\n\r\nsecret-2\r\n".encode("utf-8-sig"))
    assert read_keys(path) == ("secret-1", "secret-2")
    for text in ("", "\n", "two words", "good\nsch\u00f6n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="holds no API key"):
            read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read: no such file"):
        read_keys(tmp_path / "none")
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=f"^{path}:1 is not UTF-8") as error:
        read_keys(path)
    assert "iconv" in (error.value.hint or "")


def test_a_method_of_the_clients_own_is_not_written_to_the_log(live, caplog, monkeypatch):
    def logged():
        return [r.getMessage() for r in caplog.records if r.name == "nanochat_core.server.access"]

    monkeypatch.setattr(live.service, "rules", ServerConfig())
    with caplog.at_level("INFO"):
        for method in ("SECRET" * 1000, "GET"):
            with httpx.Client() as http:
                http.request(method, f"{live.url}/health", timeout=PATIENCE)
        wait_until(lambda: len(logged()) == 2)
    assert " other /health 405 " in logged()[0]
    assert " GET /health 200 " in logged()[1]
