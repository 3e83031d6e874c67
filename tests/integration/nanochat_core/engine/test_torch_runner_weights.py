"""The torch runner's own form of the weights and of the pages, beside the model's."""

import pytest
import torch

from nanochat_core.engine.runner import Chunk
from tests.support.nanochat_core.engine.torch_slots import (
    GREEDY,
    begin,
    expected,
    give_pages,
    matrices_of,
    open_small,
    prompts_of,
    whole,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_refresh_takes_over_what_was_written_to_the_model(make_model, dtype):
    model = make_model()
    runner, prompt = open_small(model, dtype=dtype), [1, 2, 3, 4]
    give_pages(runner, 0)
    before = whole(runner, 0, prompt)
    addresses = [values.data_ptr() for values in matrices_of(runner)]
    other = make_model(seed=1)
    with torch.no_grad():
        for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(theirs)
    runner.refresh()
    assert [values.data_ptr() for values in matrices_of(runner)] == addresses
    after = whole(runner, 0, prompt)
    fresh = open_small(other, dtype=dtype)
    give_pages(fresh, 0)
    assert torch.equal(after, whole(fresh, 0, prompt))
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pass_that_wants_no_logits_keeps_what_it_read(make_model, dtype):
    model = make_model()
    runner = open_small(model, dtype=dtype)
    tokens = prompts_of(1, seed=3)[0] + [1, 2, 3]
    begin(runner, [tokens], GREEDY)
    at_once = whole(runner, 0, tokens)
    begin(runner, [tokens], GREEDY)
    none = runner.prefill(
        [Chunk(slot=0, start=0, prev_token=-1, tokens=tokens[:-2], wants_logits=False)]
    )
    assert none.shape == (0, 265)
    assert none.dtype == torch.float32
    chunk = Chunk(
        slot=0, start=len(tokens) - 2, prev_token=tokens[-3], tokens=tokens[-2:], wants_logits=True
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(runner.prefill([chunk])[0], at_once, rtol=0, atol=tolerance)


def test_bf16_is_near_fp32_whatever_the_number_of_rows(make_model):
    model = make_model()
    runner = open_small(model, dtype=torch.bfloat16)
    prompts = prompts_of(4, seed=12)
    begin(runner, prompts, GREEDY)
    for count in (1, 2, 3, 4):
        chunks = [
            Chunk(slot=slot, start=0, prev_token=-1, tokens=prompts[slot], wants_logits=True)
            for slot in range(count)
        ]
        for row, prompt in zip(runner.prefill(chunks), prompts, strict=False):
            reference = expected(model, prompt)
            assert (row - reference).square().mean() < (0.03 * reference).square().mean()


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
