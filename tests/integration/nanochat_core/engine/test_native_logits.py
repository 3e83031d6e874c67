"""What the kernels promise of logits beside the contract of all runners."""

import pytest
import torch

from nanochat_core.engine.native.runner import page_bytes
from nanochat_core.engine.native.weights import FORMS
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.choose import page_groups
from nanochat_core.engine.sampling import row_key
from tests.support.nanochat_core.engine.engine_case import needs_kernels
from tests.support.nanochat_core.engine.native_models import (
    LENGTH,
    chunk,
    make_gpt,
    make_runner,
    make_tokens,
    read,
)

pytestmark = [pytest.mark.torch, needs_kernels]

TOKENS = make_tokens(LENGTH, 7)


@torch.no_grad()
def expected(model, tokens):
    return model(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("precision", FORMS)
def test_the_number_of_threads_changes_no_bit(precision):
    model = make_gpt({"width": 128})
    runners = [make_runner(model, precision=precision, num_threads=n) for n in (1, 3)]
    for count, cuts in ((1, ()), (3, (40,)), (4, (1, 16, 32))):
        one, three = (read(runner, count - 1, TOKENS, *cuts) for runner in runners)
        assert torch.equal(one, three)
    found = []
    for runner in runners:
        for slot in range(4):
            runner.start(slot, SamplingParams(), key=row_key(slot, 3), num_log_probs=None)
            logits = read(runner, slot, TOKENS[: 5 + 20 * slot])
            runner.sample_first([slot], logits, [5 + 20 * slot], [TOKENS[4 + 20 * slot]])
        found.append(
            [
                runner.decode(slots, [LENGTH] * len(slots), 5)().tokens
                for slots in ([0, 1, 2, 3], [3, 1], [2])
            ]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", FORMS)
def test_what_an_earlier_request_left_in_a_page_is_never_read(precision):
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    clean = read(runner, 0, TOKENS, 40)
    for pool in runner._pools:
        pool.fill_(0xFF)  # a NaN in every form
    assert torch.equal(read(runner, 0, TOKENS, 40), clean)


@pytest.mark.parametrize(
    "name", ["lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_q"]
)
def test_a_nan_among_the_weights_is_one_where_torch_has_one(name):
    model = make_gpt()
    model.get_parameter(f"{name}.weight").data[5, 0] = torch.nan
    logits = read(make_runner(model), 0, TOKENS)
    assert logits.isnan().any()
    assert torch.equal(logits.isnan(), expected(model, TOKENS)[-1:].isnan())


@pytest.mark.parametrize("precision", FORMS)
def test_memory_of_pages_is_what_was_stated(precision):
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    for group, pool in zip(page_groups(model.config, num_pages=25), runner._pools, strict=True):
        assert pool.nbytes == 25 * page_bytes(model.config, precision, group)


def test_tokens_outside_the_vocabulary_are_our_own_bug():
    runner = make_runner(make_gpt())
    for bad in (-1, 100):
        with pytest.raises(AssertionError, match="token"):
            runner.prefill([chunk(0, [3, bad], 0, 2)])
