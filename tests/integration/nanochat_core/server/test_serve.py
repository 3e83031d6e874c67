import contextlib
import re
import signal
import socket
import subprocess
import sys

import httpx
import psutil
import pytest

from nanochat_core.engine.engine import Engine
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.model.checkpoint import load_model
from nanochat_core.runtime.process_start import start_of
from nanochat_core.server.config import ServerConfig
from nanochat_core.server.launch import MAKER, Engines, open_port
from nanochat_core.server.serve import serve
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_for_completion
from tests.support.nanochat_core.server.live import (
    FAKE,
    PATIENCE,
    body,
    events_of,
    text_of,
    wait_until,
)

pytestmark = pytest.mark.torch
PROGRAM = "tests.support.nanochat_core.server.process"


@contextlib.contextmanager
def started(directory, *, maker=MAKER):
    """Start a server in a process; give it and its URL. With FAKE engines import no torch."""
    command = [sys.executable, "-m", PROGRAM, str(directory), "16", "64", maker]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = server.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found is not None, line
            yield server, found[0]
        finally:
            server.kill()


def refused(directory, kind, match, *, host="127.0.0.1", port=0):
    with pytest.raises(kind, match=match) as error:
        serve(directory, name="it", host=host, port=port, engines=Engines(), rules=ServerConfig())
    return error.value.hint


def test_what_is_no_model_is_refused(tmp_path, model_dir):
    (tmp_path / "tokenizer").mkdir()
    Tokenizer.load(model_dir / "tokenizer").save(tmp_path / "tokenizer")
    assert refused(tmp_path, ModelError, f"^{tmp_path} is not a model: it has no config.json$")


def test_a_taken_port_is_refused_before_the_model_is_read(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        match = f"^cannot listen on 127.0.0.1 port {port}: address already in use$"
        assert "--port" in refused(tmp_path, ConfigError, match, port=port)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70000), *((host, 0) for host in ("192.0.2.1", "a..b"))]
)
def test_an_address_that_cannot_be_is_refused(tmp_path, host, port):
    assert refused(tmp_path, ConfigError, "^(cannot listen on|port is)", host=host, port=port)


def test_an_accepted_connection_sends_each_answer_at_once():
    with open_port("127.0.0.1", 0) as listener:
        # Else asyncio leaves Nagle's algorithm on, which holds answers back for 40 ms.
        assert listener.proto == socket.IPPROTO_TCP


@pytest.fixture(scope="module")
def url(model_dir):
    """Of a server for the tests that leave it as it was; Ctrl-C then ends it without a word."""
    with started(model_dir) as (server, found):
        yield found
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE) == 0
        # How it answers, said at the start, and nothing else.
        assert re.fullmatch(r"answers: .+ up to 16 at a time\n", server.stderr.read())


def test_it_answers_as_the_engine_does(model_dir, url):
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        stats = http.get("/stats").json()
        assert (stats["model"], stats["context"]) == ("my_model", 4096)
        ask = body("hello", max_tokens=12, temperature=0)
        events = events_of(http.post("/chat/completions", json=ask).text)
    import torch

    tokenizer = Tokenizer.load(model_dir / "tokenizer")
    engine = Engine(load_model(model_dir, torch.device("cpu")), tokenizer)
    prompt = render_for_completion(tokenizer, {"messages": body("hello")["messages"]})
    [ids], _ = engine.generate_batch(prompt, max_tokens=12, temperature=0.0)
    assert text_of(events) == tokenizer.decode(ids[len(prompt) :])


def test_a_signal_lets_answers_under_way_finish(model_dir):
    with (
        started(model_dir, maker=FAKE) as (server, url),
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
    ):
        with http.stream("POST", "/chat/completions", json=body("long", max_tokens=300)) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.terminate()
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == 'data: {"done": true}'
        assert '"usage"' in rest[-2]
        assert server.wait(timeout=PATIENCE) in (0, -signal.SIGTERM)


def test_the_engine_ends_with_a_server_that_was_killed(model_dir):
    with started(model_dir, maker=FAKE) as (server, url):
        httpx.post(f"{url}/chat/completions", json=body("echo a"), timeout=PATIENCE)
        engines = psutil.Process(server.pid).children()
        assert engines
        server.kill()
        wait_until(lambda: not any(start_of(engine.pid) for engine in engines))
