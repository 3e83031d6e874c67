"""The bench next to llama.cpp: what a step of it is."""

import pytest

pytest.importorskip("torch")

from bench import llama

pytestmark = pytest.mark.torch


def test_a_step_is_the_median_of_the_rounds() -> None:
    times = {"own_first": [3.0, 1.0, 2.0], "own_rest": [0.1, 0.2, 0.3], "first": [1.0]}
    row = llama.summarise(times | {"rest": [0.4]}, 2)
    assert row["tokens_per_cpu_second"] == 2 * (llama.TOKENS - 1) / 0.2
    assert (row["first_ms"], row["llama_first_ms"]) == (2000.0, 1000.0)
