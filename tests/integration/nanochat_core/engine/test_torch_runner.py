"""The runner in plain torch, beside the model's own forward pass."""

import pytest
import torch

from nanochat_core.engine.runners.torch_runner import TorchRunner
from tests.support.nanochat_core.engine.native_models import read
from tests.support.nanochat_core.engine.torch_slots import expected, open_small
from tests.support.nanochat_core.random_gpt import capacity_of, random_gpt

pytestmark = pytest.mark.torch


def test_long_prompts_are_read_in_blocks_with_the_models_logits():
    model, generator = random_gpt(140, 512, 512), torch.Generator().manual_seed(1)
    capacity = capacity_of(model, num_slots=1, page_size=16, max_len=512, num_pages=40)
    runner = TorchRunner(model, dtype=torch.float32, capacity=capacity, stop_tokens=[])
    tokens = torch.randint(0, 256, (450,), generator=generator).tolist()
    for group in range(2):
        runner.set_table(group, 0, 0, range(1, 33))
    for row in (read(runner, 0, tokens)[0], read(runner, 0, tokens, 190)[1]):
        torch.testing.assert_close(row, expected(model, tokens), rtol=0, atol=2e-5)


def test_pages_that_follow_each_other_are_read_without_a_copy(make_model):
    runner = open_small(make_model())
    pool = runner.pools[0]
    runner.set_table(0, 0, 0, [5, 6, 7, 3, 4])
    assert pool.find(0, 1, 11).pages is None
    assert pool.find(0, 13, 20).pages is None
    assert pool.find(0, 9, 14).pages is not None
    runner.set_table(0, 0, 3, [8])
    assert pool.find(0, 9, 14).pages is None
    assert pool.find(0, 9, 17).pages is not None
