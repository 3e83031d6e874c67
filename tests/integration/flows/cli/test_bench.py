"""`nanochat bench` on a random model of two layers."""

import json
import re
from pathlib import Path

import pytest

from flows.cli.app import main
from nanochat_core.model.checkpoint import save_model
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.random_gpt import random_gpt

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    directory = tmp_path_factory.mktemp("model")
    (tokenizer := directory / "tokenizer").mkdir()
    Tokenizer({bytes([i]): i for i in range(256)}).save(tokenizer)
    gpt = random_gpt(32, 128, width=64, num_heads=4)
    save_model(directory, gpt, tokenizer=tokenizer, optimizer={}, made_by="test")
    return directory


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanochat_core.engine.speed.PROBE_BYTES", 2**20)
    monkeypatch.setattr("nanochat_core.engine.speed.PROBE_SECONDS", 0.0)


def test_a_row_for_each_batch_size_and_the_figures_on_the_last_line(model, capsys):
    words = ["--batch-sizes", "1", "3", "--tokens", "5", "--prompt-len", "40", "--rounds", "1"]
    assert main(["bench", str(model), *words, "--runner", "torch"]) == 0
    out, err = capsys.readouterr()
    *shown, last = out.strip().splitlines()
    assert "tokens/s" in shown[1]
    assert [line.split()[0] for line in shown[2:4]] == ["1", "3"]
    assert re.match(r"reading gets [\d.]+ [MG]B/s out of", shown[4])
    assert "measuring 3 at a time" in err
    tree = json.loads(last)
    assert tree["choice"]["runner"] == "torch"
    assert tree["choice"]["precision"] == "fp32"
    assert [speed["batch_size"] for speed in tree["speeds"]] == [1, 3]
    # Matrices of fp32: blocks of 64 x (64 + 32 + 32 + 64 + 256 + 256), a gate of 2 x 12 on the last
    # layer, and lm_head with its 320 rows. Then keys and values of 42 tokens, of which the first
    # layer's window shows 33: 2 heads of 16 channels, twice.
    matrices = 4 * (2 * 64 * 704 + 2 * 12 + 320 * 64)
    past = 4 * 2 * 32 * (33 + 42)
    for speed in tree["speeds"]:
        assert speed["bytes_per_step"] == matrices + speed["batch_size"] * past
        assert speed["tokens_per_second"] == pytest.approx(speed["batch_size"] / speed["step"])
        share = speed["bytes_per_step"] / speed["step"] / tree["bandwidth"]
        assert speed["bandwidth_share"] == pytest.approx(share)


def test_random_weights_of_a_depth_need_no_model(capsys, tmp_path):
    words = ["--depth", "1", "--batch-sizes", "2", "--tokens", "2", "--rounds", "1"]
    assert main(["bench", *words, "--home", str(tmp_path)]) == 0
    tree = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert tree["model"] == "depth 1, random weights"


def test_a_first_mistake_is_one_line_and_a_hint(terminal):
    for words in ("", "tiny --depth 2", "./nowhere"):
        terminal.refuses(f"bench {words}")
    for words in ("--precision int4", "--prompt-len 2040"):
        terminal.refuses(f"bench --depth 1 {words}")


def test_what_this_machine_lacks_is_refused(terminal, capsys):
    error, hint = terminal.fails("bench", "--depth", "1", "--runner", "tpu")
    assert error.startswith("there is no runner 'tpu' for ")
    assert "torch" in hint
    assert main(["bench", "--depth", "1", "--threads", "99999"]) == 1
    assert capsys.readouterr().err.startswith("error: --threads is 99999, this machine has ")
