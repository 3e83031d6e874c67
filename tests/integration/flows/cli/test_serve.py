"""A model is served out of the store, and another one as soon as its name stands for that."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from flows.artifacts.names import open_model
from flows.cli.options import StoreOptions
from flows.cli.use.serve import newer_model
from tests.support.flows.rows import publish_directory
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

pytestmark = pytest.mark.torch


@pytest.fixture
def where(tmp_path: Path) -> StoreOptions:
    (tmp_path / "home").mkdir()
    return StoreOptions(home=tmp_path / "home", store=f"file://{tmp_path}/store")


def test_a_model_is_pulled_from_the_store_and_answers(where, model):
    store = where.open_store()
    put_run(store, "tiny-1", publish_directory(store, "sft", model))
    assert where.home is not None
    command = ["serve", "sft@tiny", "--home", str(where.home), "--store", str(where.store)]
    command += ["--gpus", "0", "--port", "0", "--log", "none"]
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli.app", *command], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            found = re.search(r"http://\S+", line)
            with httpx.Client(base_url=found[0], timeout=200) as http:
                assert http.get("/health").json()["model"] == "sft@tiny"
                message = {"role": "user", "content": "hello"}
                ask = {"messages": [message], "max_tokens": 3}
                assert http.post("/chat/completions", json=ask).text.endswith('"done": true}\n\n')
            server.send_signal(signal.SIGINT)
            assert server.wait() == 0
        finally:
            server.kill()


def test_a_newer_model_of_the_same_stage_is_found(where, tmp_path):
    (files := tmp_path / "files").mkdir()
    (files / "data").write_text("one")
    store = where.open_store()
    model = publish_directory(store, "sft", files)
    put_run(store, "tiny-1", model)
    directory = open_model(store, "sft@tiny", cache=where.cache, warn=print)
    find = newer_model(where, "sft@tiny", "tiny")
    rl = put_artifact(store, make_manifest("rl", inputs={"sft": model}))
    put_run(store, "tiny-2", model, rl, started="2026-11-21T07:00:00Z")
    assert find() == directory
    (files / "data").write_text("other")
    put_run(store, "tiny-3", publish_directory(store, "sft", files), started="2026-11-21T08:00:00Z")
    newer = find()
    assert newer != directory
    assert (newer / "data").read_text() == "other"
    assert find() == newer
