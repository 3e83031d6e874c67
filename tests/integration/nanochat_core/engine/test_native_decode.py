"""The kernels sample as sampling.py does from any logits, and leave nothing behind."""

import gc
from pathlib import Path

import pytest
import torch

from nanochat_core.engine.native.runner import page_bytes
from nanochat_core.engine.native.weights import FORMS
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.choose import page_groups
from nanochat_core.engine.sampling import row_key, sample
from tests.integration.nanochat_core.engine.test_runner_contract import DRAW, PROMPTS, answer, begin
from tests.support.nanochat_core.engine.engine_case import needs_kernels
from tests.support.nanochat_core.engine.native_models import (
    LENGTH,
    VOCAB,
    chunk,
    make_gpt,
    make_runner,
    make_tokens,
    read,
)
from tests.support.nanochat_core.engine.row_keys import row_keys

pytestmark = [pytest.mark.torch, needs_kernels]


def native_sample(logits, params, seed, position):
    """One token for each row of logits (n, V), whose sample is the row's index."""
    runner = make_runner(make_gpt({"vocab_size": logits.size(1)}), num_slots=len(logits))
    for slot in range(len(logits)):
        runner.start(slot, params, key=row_key(seed, slot), num_log_probs=None)
    at = [position] * len(logits)
    return runner.sample_first(range(len(logits)), logits, at, at).tokens[0]


@pytest.mark.parametrize("seed", [0, -5, 2**62])
@pytest.mark.parametrize("top_k", [None, 1, 7, 99, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-42, 0.01, 0.8, 3.0])
def test_equal_logits_give_equal_tokens(temperature, top_k, seed):
    logits = 4 * torch.randn((200, VOCAB), generator=torch.Generator().manual_seed(5))
    keys = row_keys(torch.full((200,), seed), torch.arange(200))
    top_p = 0.9 if 0 < temperature < 0.01 and top_k is None else 1.0
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = sample(logits, keys, torch.full((200,), 12), params).tolist()
    found = native_sample(logits, params, seed, 12)
    # The last bit of a sum may tell two neighbours apart: once in a hundred thousand.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
    if temperature < 0.01:
        assert found == expected == logits.argmax(dim=-1).tolist()


def test_saturated_logits_are_distinguished_as_after_the_softcap():
    model = make_gpt()
    with torch.no_grad():
        model.lm_head.weight.mul_(200)  # most logits round to the cap
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=5)):
        runner = make_runner(model)
        found = answer(runner, 1, params, 12)
        tokens = PROMPTS[1] + found
        logits = read(make_runner(model), 0, tokens[:-1], *range(40, len(tokens) - 1))
        again = make_runner(model)
        for step, row in enumerate(logits):
            again.start(2, params, key=row_key(7, 1), num_log_probs=None)
            output = again.sample_first([2], row[None], [40 + step], [0]).tokens[0][0]
            assert output == found[step]


def test_runners_that_are_gone_leave_no_thread_and_no_memory():
    def count():
        return len(list(Path("/proc/self/task").iterdir()))

    model = make_gpt()
    begin(make_runner(model, num_threads=3), 0, DRAW)
    gc.collect()
    before = count()
    for _ in range(20):
        begin(make_runner(model, num_threads=3), 0, DRAW)
    gc.collect()
    # Threads of earlier tests in this process may end meanwhile; 20 leaks would be 40 threads.
    assert count() < before + 20
    mapped = Path("/proc/self/maps").read_text()
    runner = make_runner(model)
    runner.close()
    runner.close()  # harmless
    del runner
    gc.collect()
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= len(mapped.splitlines()) + 2


def test_what_the_kernels_would_not_survive_is_stopped_before():
    runner = make_runner(make_gpt())
    for first, pages in ((5, [1, 2]), (-1, [1]), (0, [10**6]), (0, [-1])):
        with pytest.raises(AssertionError, match=r"entries|pages"):
            runner.set_table(0, 0, first, pages)
    with pytest.raises(AssertionError, match="tokens of"):
        runner.decode([0], [LENGTH + 2], 1)
    for token in (-1, 100):
        with pytest.raises(AssertionError, match="token"):
            runner.prefill([chunk(0, [3, token], 0, 2)])


def test_of_equal_tokens_the_lowest_is_likeliest_and_an_odd_top_k_leaves_all():
    greedy, logits = SamplingParams(temperature=0.0), torch.zeros((1, VOCAB))
    for first in (0, 64):
        logits[0, first:] = float(first)
        assert native_sample(logits, greedy, 1, 1) == [first]
    logits = torch.randn((50, VOCAB), generator=torch.Generator().manual_seed(5))
    found = [native_sample(logits, SamplingParams(top_k=k), 1, 1) for k in (None, 0, -3, 10**15)]
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize("vocab", [33, 47, 48, 100])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_logits_that_are_no_numbers_do_no_harm(vocab, value):
    every, one = torch.full((2, vocab), value), torch.zeros(2, vocab)
    one[:, 5] = value
    for params in (SamplingParams(temperature=0.0), DRAW, SamplingParams(temperature=1.0)):
        for logits in (every, one):
            tokens = native_sample(logits, params, 1, 1)
            assert all(0 <= token < vocab for token in tokens)
            if logits is one:
                assert all((token == 5) == (value > 0) for token in tokens)


# Of logits, beyond the contract of all runners.

TOKENS = make_tokens(LENGTH, 7)


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
    with torch.no_grad():
        assert torch.equal(logits.isnan(), model(torch.tensor([TOKENS]))[0, -1:].isnan())


@pytest.mark.parametrize("precision", FORMS)
def test_memory_of_pages_is_what_was_stated(precision):
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    for group, pool in zip(page_groups(model.config, num_pages=25), runner._pools, strict=True):
        assert pool.nbytes == 25 * page_bytes(model.config, precision, group)
