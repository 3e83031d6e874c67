import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from nanochat_core.model.checkpoint import save_model
from nanochat_core.server.__main__ import main

pytestmark = pytest.mark.torch


@pytest.fixture
def model_dir(model, tokenizer, tmp_path):
    directory = tmp_path / "my_model"
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "tokenizer")
    save_model(directory, model, tokenizer=directory / "tokenizer", optimizer={}, made_by="sft")
    return directory


def test_what_is_no_model_is_refused_in_two_lines(tmp_path, capsys):
    assert main([str(tmp_path), "--port", "0"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: {tmp_path} is not a model: it has no config.json"
    assert hint.startswith("hint: ")


def test_a_taken_port_is_refused_before_the_model_is_read(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main([str(tmp_path), "--port", str(port)]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: cannot listen on 127.0.0.1 port {port}: address already in use"
    assert "--port" in hint


@pytest.mark.parametrize("where", [["--port", "70000"], ["--host", "192.0.2.1", "--port", "0"]])
def test_an_address_that_cannot_be_is_refused(tmp_path, capsys, where):
    assert main([str(tmp_path), *where]) == 1
    assert re.match("error: (cannot listen on|port is)", capsys.readouterr().err)


def test_it_serves_until_it_is_interrupted(model_dir):
    command = [sys.executable, "-m", "nanochat_core.server", str(model_dir), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        found = re.search(r"http://\S+", server.stderr.readline())
        assert found is not None
        with httpx.Client(base_url=found[0], timeout=30) as http:
            assert http.get("/health").json()["model"] == "my_model"
            ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            assert http.post("/chat/completions", json=ask).text.endswith('{"done": true}\n\n')
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0
        assert server.stderr.read() == ""
