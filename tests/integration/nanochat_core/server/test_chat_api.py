import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanochat_core.server.api import openai_api, prompts
from nanochat_core.server.service import ServerConfig
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import parse_answer
from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER
from tests.support.nanochat_core.server.live import (
    NAME,
    body,
    events_of,
    raw,
    received,
    serving,
    wait_until,
)


def letters(text):
    return [{"token": letter, "gpu": 0} for letter in text]


SPECIAL = "<|assistant_end|><|bos|>"  # typed, these stay text
STREAMS = {  # what is asked, the events before the usage, tokens written
    "echo hello": (letters("hello"), 5),
    "call": (
        [*letters("it is "), {"tool_call": "12*3"}, {"tool_result": "36"}, *letters("36")],
        18,  # with the special ones around call and result
    ),
    "echo #### 42": ([{"token": "", "gpu": 0, "marker": "#### "}, {"token": "42", "gpu": 0}], 7),
    f"echo {SPECIAL}": (letters(SPECIAL), len(SPECIAL)),
}


@pytest.mark.parametrize("text", STREAMS)
def test_an_answer_is_streamed_as_events(live, text):
    *tokens, usage, done = live.ask(text)
    expected, count = STREAMS[text]
    assert tokens == expected
    assert usage["usage"].pop("seconds") >= 0
    prompt = 5 + len(text) - 1  # bos, start, end and where the answer begins
    counts = {"prompt_tokens": prompt, "completion_tokens": count, "finish_reason": "stop"}
    assert usage == {"usage": counts}
    assert done == {"done": True}


def test_an_answer_ends_at_its_limit(live):
    *_, usage, _ = live.ask("long", max_tokens=9)
    cut = {"completion_tokens": 9, "finish_reason": "length"}
    assert usage["usage"].items() >= cut.items()


def test_the_stream_is_one_that_nothing_holds_back(live):
    headers = live.post().headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


def test_a_call_in_an_earlier_answer_is_one_in_the_prompt():
    answer = 'p-p: <<"pp".count("p")=2>>#### 2'
    said = [("user", "<<1+1=2>>"), ("assistant", answer), ("user", "and?")]
    prompt = prompts.make_chat_prompt(
        TOKENIZER, said, context=4096, max_tokens=1, overflow="refuse"
    )
    start, end = TOKENIZER.special("<|assistant_start|>"), TOKENIZER.special("<|assistant_end|>")
    assert parse_answer(TOKENIZER, prompt[prompt.index(start) + 1 :]) == answer
    calls = [i for i, token in enumerate(prompt) if token == TOKENIZER.special("<|python_start|>")]
    assert len(calls) == 1  # what a user types is text
    assert prompt.index(start) < calls[0] < prompt.index(end)


@pytest.mark.parametrize("content", ["<<1=1>>" * 5, "word " * 12])
def test_five_hundred_messages_are_cut_to_fit_in_one_pass_and_encoded_at_most_twice(
    monkeypatch, content
):
    rendered, encoded = [], []
    render, encode = prompts.render_for_completion, Tokenizer.encode
    monkeypatch.setattr(
        prompts, "render_for_completion", lambda *given: rendered.append(0) or render(*given)
    )
    monkeypatch.setattr(Tokenizer, "encode", lambda *given: encoded.append(0) or encode(*given))
    many = [(("user", "assistant")[i % 2], content) for i in range(499)]
    prompt = prompts.make_chat_prompt(TOKENIZER, many, context=4096, max_tokens=1, overflow="drop")
    assert 4000 < len(prompt) < 4096
    assert len(rendered) == 1
    assert "<<" in content or len(encoded) <= 2 * len(many)


@pytest.mark.parametrize("text", ["fail", "refuse"])
def test_a_failure_is_reported_in_the_stream_and_ends_it(live, text):
    *_, error, done = live.ask(text)
    assert error.keys() == {"error"}
    assert done == {"done": True}


def test_a_message_longer_than_the_context_is_refused(live):
    response = live.post(ask=body("x" * 5000))
    assert response.status_code == 400
    assert "too long: 5004 tokens, the model reads 4095" in response.json()["detail"]


def conversation(turns):
    roles = ("user", "assistant")
    contents = [f"{i}" * 1000 for i in range(turns)]
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def test_the_oldest_turns_make_room_for_the_answer(live):
    events = events_of(live.post(ask=conversation(7)).text)
    # 512 tokens are kept for the answer, so three turns of 1002 tokens are left.
    assert events[-2]["usage"]["prompt_tokens"] == 3 * 1002 + 2


def test_or_are_refused_with_both_numbers():
    with serving(ServerConfig(log="none", overflow="refuse")) as live:
        response = live.post(ask=conversation(7))
        assert live.ask("echo yes")[0] == {"token": "y", "gpu": 0}
    assert response.status_code == 400
    detail = response.json()["detail"]
    assert "7016 tokens and max_tokens is 512: together 7528, the model's context is 4096" in detail


def test_too_many_requests_are_sent_away_and_waiting_ones_are_not(tmp_path):
    rules = ServerConfig(log="none", max_waiting=2)
    with serving(rules, num_slots=1) as live, ThreadPoolExecutor(3) as threads:
        asks = []
        for i in range(3):
            asks.append(threads.submit(live.ask, f"hold {tmp_path / 'go'}"))
            wait_until(lambda i=i: live.health()["waiting"] == i)
        refused = live.post()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "nanochat_waiting 2.0" in live.get("/metrics").text
        (tmp_path / "go").touch()
        assert all(ask.result()[-1] == {"done": True} for ask in asks)


def test_a_waiting_request_whose_client_left_is_never_begun():
    with serving(num_slots=1) as live, live.client() as http:
        with live.answering():
            with http.stream("POST", "/chat/completions", json=body()):
                wait_until(lambda: live.health()["waiting"] == 1)
            wait_until(lambda: live.health()["waiting"] == 0)
            assert live.health()["running"] == 1
        wait_until(lambda: live.health()["running"] == 0)


def test_a_silent_stream_gets_keep_alive_comments():
    rules = ServerConfig(log="none", ping_seconds=0.05)
    with (
        serving(rules, num_slots=1) as live,
        live.answering(),
        live.client() as http,
        http.stream("POST", "/chat/completions", json=body()) as waiting,
    ):
        assert next(waiting.iter_lines()) == ": ping"


def test_a_slow_reader_delays_no_other(live):
    with live.connect(buffer=4096) as slow:
        slow.sendall(raw(body("long", max_tokens=4000)))
        wait_until(lambda: live.health()["running"] == 1)
        assert live.ask("echo quick")[-1] == {"done": True}
    wait_until(lambda: live.health()["running"] == 0)


def test_no_contents_are_logged_unless_asked_for(caplog):
    caplog.set_level("INFO", logger="nanochat_core.server")
    with serving(ServerConfig(log="access")) as live:
        live.ask("echo secret")
    assert "secret" not in caplog.text
    assert "POST /chat/completions 200 15+6 tokens" in caplog.text
    with serving(ServerConfig(log="contents")) as live:
        live.ask("echo secret")
    assert caplog.text.count("secret") >= 2


def test_the_page_is_served_with_its_policy(live):
    page = live.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert "script-src 'sha256-" in policy


def test_stats_and_health_have_what_nanochats_clients_and_the_page_need():
    with serving(num_slots=1) as live:
        assert live.health().items() >= {"num_gpus": 1, "available_workers": 1}.items()
        with live.answering():
            assert live.health()["available_workers"] == 0
            stats = live.get("/stats").json()
    assert [stats[f"{kind}_workers"] for kind in ("total", "available", "busy")] == [1, 0, 1]
    worker = {"gpu_id": 0, "device": "cpu", "ready": True}
    assert stats["workers"][0].items() >= worker.items()
    assert stats["parameters"] == 12345
    assert stats["context"] == 4096
    assert stats["defaults"] == {"temperature": 0.6, "top_k": 50, "max_tokens": 512}
    assert stats["limits"]["max_tokens"] == [1, 4096]
    assert stats["queue"] == {"running": 1, "waiting": 0, "slots": 1, "max_waiting": 64}


def test_a_request_that_finds_no_place_is_refused_before_it_is_tokenised(monkeypatch):
    def fail(*_args, **_options):
        raise AssertionError("it was tokenised")

    rules = ServerConfig(log="none", max_waiting=0)
    with serving(rules, num_slots=1) as live, live.answering():
        monkeypatch.setattr(prompts, "make_chat_prompt", fail)
        monkeypatch.setattr(openai_api, "make_text_prompt", fail)
        assert live.post().status_code == 503
        for path, ask in (("/v1/chat/completions", body()), ("/v1/completions", {"prompt": "x"})):
            refused = live.post(path, ask)
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "overloaded_error"
            assert int(refused.headers["retry-after"]) > 0  # OpenAI's library asks again by itself


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/completions", "/nothing", "/health"])
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD"])
@pytest.mark.parametrize("coding", ["chunked", "Chunked"])
def test_two_lengths_of_one_body_are_refused_and_end_the_connection(live, path, method, coding):
    text = json.dumps(body()).encode()
    request = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: 5\r\nTransfer-Encoding: {coding}\r\n\r\n{len(text):x}\r\n"
    )
    smuggled = b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n"
    with live.connect() as connection:
        connection.sendall(request.encode() + text + b"\r\n0\r\n\r\n" + smuggled)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()


GETS = ["/", "/health", "/stats", "/metrics", "/openapi.json", "/v1/models", f"/v1/models/{NAME}"]


@pytest.mark.parametrize("path", [*GETS, "/nothing", "/v1/models/other", "/chat/completions"])
def test_head_is_answered_as_get_is_without_a_body(live, path):
    with live.client() as http:  # one connection: a body would be read as the next answer
        for _ in range(2):
            head, get = http.head(path), http.get(path)
            assert head.status_code == get.status_code == (200 if path in GETS else get.status_code)
            assert head.content == b""
            for name in ("content-type", "x-frame-options", "allow", "content-security-policy"):
                assert head.headers.get(name) == get.headers.get(name)
    if path in GETS and path != "/openapi.json":  # which the metrics count as "other"
        route = "/v1/models/{name:path}" if path.endswith(NAME) else path
        assert live.count("nanochat_requests_total", route=route, status="200") >= 2
