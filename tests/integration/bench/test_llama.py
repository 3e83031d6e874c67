"""The bench next to llama.cpp: a step of it, and the file that it writes."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench import llama
from nanochat_core.scaling import model_for_depth

pytestmark = pytest.mark.torch


def test_a_step_is_the_median_of_the_rounds() -> None:
    times = {"own_first": [3.0, 1.0, 2.0], "own_rest": [0.1, 0.2, 0.3], "first": [1.0]}
    row = llama.summarise(times | {"rest": [0.4]}, 2)
    assert row["tokens_per_cpu_second"] == 2 * (llama.TOKENS - 1) / 0.2
    assert (row["first_ms"], row["llama_first_ms"]) == (2000.0, 1000.0)


def test_the_llama_has_as_many_parameters_in_matrices(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    config = model_for_depth(2, vocab_size=512)
    llama.write_llama(tmp_path / "model.gguf", config, "Q8_0")
    found = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    count = sum(int(t.n_elements) for t in found if ".attn_" in t.name or ".ffn_" in t.name)
    assert count == pytest.approx(config.depth * 12 * config.width**2, rel=0.05)
