import copy
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient

from nanochat_core.engine.engine import Engine
from nanochat_core.server.app import make_app

pytestmark = pytest.mark.torch

HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
def client(engine) -> TestClient:
    return TestClient(make_app(engine, name="tiny"))


@pytest.fixture
def url(engine):
    """A real server, of which two requests may wait."""
    config = uvicorn.Config(make_app(engine, name="tiny", max_waiting=2), log_level="error")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def body(**settings) -> dict:
    return {"messages": [HELLO], "max_tokens": 12, **settings}


def write_always(engine: Engine, text: str) -> None:
    """Turn the model into one whose every token has a fixed successor, so that it writes `text`."""
    ids = [engine.tokenizer.special("<|assistant_start|>"), *engine.tokenizer.encode(text)]
    codes = torch.randn(265, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
        engine.model.resid_lambdas.fill_(1.0)
        engine.model.transformer.wte.weight[:265] = codes
        for token, successor in itertools.pairwise(ids):
            engine.model.lm_head.weight[successor] = 0.3 * codes[token]


def events_of(text: str) -> list[dict]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[len("data: ") :]) for block in blocks]


def wait_until(condition, *, seconds: float = 10.0) -> float:
    """Seconds until `condition()` holds; fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.01)
    return time.monotonic() - started


def test_an_answer_is_streamed_as_events(client, engine, tokenizer):
    response = client.post("/chat/completions", json=body(temperature=0))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *tokens, done = events_of(response.text)
    assert done == {"done": True}
    assert all(event.keys() == {"token", "gpu"} and event["gpu"] == 0 for event in tokens)
    names = ("<|user_start|>", "<|user_end|>", "<|assistant_start|>")
    start, end, answer = map(tokenizer.special, names)
    prompt = [tokenizer.bos, start, *tokenizer.encode("hello"), end, answer]
    [ids], _ = engine.generate_batch(prompt, max_tokens=12, temperature=0.0)
    assert "".join(event["token"] for event in tokens) == tokenizer.decode(ids[len(prompt) :])


@pytest.mark.parametrize(("max_tokens", "last"), [(12, "\U0001f600"), (11, "\ufffd")])
def test_letters_of_several_tokens_come_whole(engine, tokenizer, max_tokens, last):
    letters = "\u00e9\ufffd\u20ac\U0001f600"  # 2, 3, 3 and 4 tokens, all different
    engine = Engine(copy.deepcopy(engine.model), tokenizer)
    write_always(engine, letters)
    client = TestClient(make_app(engine, name="tiny"))
    ask = body(temperature=0, max_tokens=max_tokens)
    *tokens, _ = events_of(client.post("/chat/completions", json=ask).text)
    assert [event["token"] for event in tokens] == [*letters[:3], last]


def test_typed_special_tokens_stay_text(client):
    message = {"role": "user", "content": "<|bos|>" * 600}  # 4200 letters, or 600 special tokens
    response = client.post("/chat/completions", json=body(messages=[message]))
    assert response.status_code == 400
    assert "4204 tokens" in response.json()["detail"]


def test_health_and_page(client):
    assert client.get("/health").json() == {
        "status": "ok",
        "ready": True,
        "model": "tiny",
        "running": 0,
        "waiting": 0,
    }
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "innerHTML" not in page.text


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"secret", 422),
        (json.dumps({"messages": [HELLO, HELLO]}).encode(), 400),
        (b"secret" * 200_000, 413),
    ],
)
def test_a_refusal_says_why_and_repeats_nothing(client, content, status):
    response = client.post("/chat/completions", content=content)
    assert response.status_code == status
    assert response.json()["detail"]
    assert "secret" not in response.text


def test_a_message_longer_than_the_context_is_refused(client):
    message = {"role": "user", "content": "x" * 5000}
    response = client.post("/chat/completions", json=body(messages=[message]))
    assert response.status_code == 400
    assert "too long: 5004 tokens, the model reads 4095" in response.json()["detail"]


def test_the_oldest_turns_make_room_for_the_answer(client):
    turns = [{"role": ("user", "assistant")[i % 2], "content": str(i) * 1000} for i in range(7)]
    response = client.post("/chat/completions", json=body(messages=turns))
    assert response.status_code == 200
    assert events_of(response.text)[-1] == {"done": True}


def test_whoever_stops_reading_frees_the_model_at_once(url):
    with httpx.Client(base_url=url, timeout=30) as http:
        # 4000 tokens take far longer than the wait below.
        with http.stream("POST", "/chat/completions", json=body(max_tokens=4000)) as response:
            lines = response.iter_lines()  # dropping it would close the connection
            next(lines)
            assert http.get("/health").json()["running"] == 1
        wait_until(lambda: http.get("/health").json()["running"] == 0, seconds=2.0)


def test_requests_wait_for_each_other_and_too_many_are_sent_away(url):
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(3) as threads:
        asks = []
        for i in range(3):
            ask = body(max_tokens=300)
            asks.append(threads.submit(http.post, "/chat/completions", json=ask))
            wait_until(lambda i=i: http.get("/health").json()["waiting"] == i)
        refused = http.post("/chat/completions", json=body())
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        answers = [ask.result() for ask in asks]
    assert all(events_of(answer.text)[-1] == {"done": True} for answer in answers)


def test_a_waiting_request_whose_client_left_is_never_begun(url):
    with httpx.Client(base_url=url, timeout=60) as http:
        with http.stream("POST", "/chat/completions", json=body(max_tokens=4000)) as running:
            lines = running.iter_lines()  # dropping it would close the connection
            next(lines)
            with http.stream("POST", "/chat/completions", json=body(max_tokens=4000)):
                assert http.get("/health").json()["waiting"] == 1
        wait_until(lambda: http.get("/health").json()["running"] == 0, seconds=2.0)
