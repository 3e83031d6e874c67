"""Decoding in the kernels draws as sampling.py draws, and stops where it has to."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanochat_core.engine.native import build
from nanochat_core.engine.native.runner import NativeRunner
from nanochat_core.engine.native.weights import FORMS, Precision
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.sampling import row_key, sample
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

REASON = build.unable_here()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}"),
]

PROMPTS = {0: make_tokens(23, 1), 1: make_tokens(40, 2), 2: make_tokens(5, 3), 3: [17]}
DRAW = SamplingParams(temperature=0.9, top_k=20)


def begin(runner: NativeRunner, slot: int, *, params: SamplingParams = DRAW) -> int:
    """Read the slot's prompt and draw the first token."""
    tokens = PROMPTS[slot]
    runner.start(slot, params, key=row_key(slot, 3), num_log_probs=None)
    logits = runner.prefill([chunk(slot, tokens, 0, len(tokens))])
    first = runner.sample_first([slot], logits, [len(tokens)], [tokens[-1]])
    return first.tokens[0][0]


def answer(runner: NativeRunner, slot: int, count: int, params: SamplingParams = DRAW) -> list[int]:
    """`count` tokens, one step a call."""
    found = [begin(runner, slot, params=params)]
    while len(found) < count:
        found += runner.decode([slot], [LENGTH], 1)().tokens[0]
    return found


@pytest.mark.parametrize("precision", FORMS)
def test_an_answer_is_the_same_alone_and_in_a_crowd(precision: Precision) -> None:
    model = make_gpt()
    alone = {
        slot: answer(make_runner(model, precision=precision, num_threads=1), slot, 30)
        for slot in PROMPTS
    }
    runner = make_runner(model, precision=precision, num_threads=2)
    crowd = {slot: [begin(runner, slot)] for slot in PROMPTS}
    for slots in ([0, 1, 2, 3], [3, 1], [1, 0, 3], [2], [0, 1, 2, 3]):
        for column in runner.decode(slots, [LENGTH] * len(slots), 5)().tokens:
            for slot, token in zip(slots, column, strict=True):
                crowd[slot].append(token)
    for slot, tokens in crowd.items():
        assert tokens == alone[slot][: len(tokens)]
        assert len(tokens) > 10


@pytest.mark.parametrize("precision", FORMS)
def test_decoded_tokens_leave_what_reading_them_leaves(precision: Precision) -> None:
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    found = answer(runner, 1, 30)
    tokens = PROMPTS[1] + found
    after = runner.prefill([chunk(1, tokens, len(tokens) - 1, len(tokens))])
    again = read(make_runner(model, precision=precision), 0, tokens)
    assert torch.equal(after, again)


def test_every_step_draws_what_sampling_draws_from_its_logits() -> None:
    model = make_gpt()
    runner = make_runner(model)
    for slot, params in enumerate(
        (
            DRAW,
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.3),
            SamplingParams(temperature=0.7, top_k=1),
        )
    ):
        found = answer(runner, slot, 40, params=params)
        other = make_runner(model)
        cuts = range(len(PROMPTS[slot]), len(PROMPTS[slot]) + len(found) - 1)
        logits = read(other, slot, (PROMPTS[slot] + found)[:-1], *cuts)
        keys = row_keys(torch.tensor([slot]), torch.tensor([3])).expand(len(found))
        positions = torch.arange(len(found)) + len(PROMPTS[slot])
        sampled = sample(logits, keys, positions, params)
        assert found == sampled.tolist()


def native_sample(logits: Tensor, params: SamplingParams, seed: int, position: int) -> list[int]:
    """One token for each row of logits (n, V), whose sample is the row's index."""
    runner = make_runner(make_gpt({"vocab_size": logits.size(1)}), num_slots=len(logits))
    for slot in range(len(logits)):
        runner.start(slot, params, key=row_key(seed, slot), num_log_probs=None)
    at = [position] * len(logits)
    return runner.sample_first(range(len(logits)), logits, at, at).tokens[0]


@pytest.mark.parametrize("seed", [0, -5, 2**62])
@pytest.mark.parametrize("top_k", [None, 1, 7, 99, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.8, 3.0])
def test_equal_logits_give_equal_tokens(temperature: float, top_k: int | None, seed: int) -> None:
    logits = 4 * torch.randn((200, VOCAB), generator=torch.Generator().manual_seed(5))
    keys = row_keys(torch.full((200,), seed), torch.arange(200))
    params = SamplingParams(temperature=temperature, top_k=top_k)
    expected = sample(logits, keys, torch.full((200,), 12), params).tolist()
    found = native_sample(logits, params, seed, 12)
    # The last bit of a sum may tell two neighbours apart: once in a hundred thousand.
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
    if temperature == 0.0:
        assert found == expected


@pytest.mark.parametrize("top_k", [0, -3, 10**15])
def test_a_top_k_that_is_none_leaves_all_tokens(top_k: int) -> None:
    logits = torch.randn((50, VOCAB), generator=torch.Generator().manual_seed(5))
    everything = native_sample(logits, SamplingParams(), 1, 1)
    assert native_sample(logits, SamplingParams(top_k=top_k), 1, 1) == everything


def test_saturated_logits_are_distinguished_as_after_the_softcap() -> None:
    model = make_gpt()
    with torch.no_grad():
        model.lm_head.weight.mul_(200)  # most logits round to the cap
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=5)):
        runner = make_runner(model)
        found = answer(runner, 1, 12, params=params)
        tokens = PROMPTS[1] + found
        logits = read(make_runner(model), 0, tokens[:-1], *range(40, len(tokens) - 1))
        again = make_runner(model)
        for step, row in enumerate(logits):
            again.start(2, params, key=row_key(1, 3), num_log_probs=None)
            output = again.sample_first([2], row[None], [40 + step], [0]).tokens[0][0]
            assert output == found[step]


def test_runners_that_are_gone_leave_no_thread_and_no_memory() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    model = make_gpt()
    begin(make_runner(model, num_threads=3), 0)
    gc.collect()
    before = count()
    for _ in range(20):
        begin(make_runner(model, num_threads=3), 0)
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


def test_what_the_kernels_would_not_survive_is_stopped_before() -> None:
    runner = make_runner(make_gpt())
    for first, pages in ((5, [1, 2]), (-1, [1]), (0, [10**6]), (0, [-1])):
        with pytest.raises(AssertionError, match=r"entries|pages"):
            runner.set_table(0, 0, first, pages)
    with pytest.raises(AssertionError, match="tokens of"):
        runner.decode([0], [LENGTH + 2], 1)


def test_the_lowest_of_equal_tokens_is_likeliest() -> None:
    logits = torch.zeros((1, VOCAB))
    assert native_sample(logits, SamplingParams(temperature=0.0), 1, 1) == [0]
    logits[0, 64:] = 2.0
    assert native_sample(logits, SamplingParams(temperature=0.0), 1, 1) == [64]


@pytest.mark.parametrize("vocab", [33, 47, 48, 100])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_logits_that_are_no_numbers_do_no_harm(vocab: int, value: float) -> None:
    every, one = torch.full((2, vocab), value), torch.zeros(2, vocab)
    one[:, 5] = value
    for params in (SamplingParams(temperature=0.0), DRAW, SamplingParams(temperature=1.0)):
        for logits in (every, one):
            tokens = native_sample(logits, params, 1, 1)
            assert all(0 <= token < vocab for token in tokens)
            if logits is one:
                assert all((token == 5) == (value > 0) for token in tokens)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=10, min_p=0.05),
        SamplingParams(temperature=0.6, repetition_penalty=1.5),
    ],
    ids=["top_p", "min_p", "penalty"],
)
def test_other_rules_are_drawn_by_sampling_beside_plain_rows(params: SamplingParams) -> None:
    model = make_gpt()
    plain = answer(make_runner(model), 0, 20)
    special = answer(make_runner(model), 1, 20, params=params)
    runner = make_runner(model)
    both = [[begin(runner, 0)], [begin(runner, 1, params=params)]]
    for column in runner.decode([0, 1], [LENGTH, LENGTH], 19)().tokens:
        both[0].append(column[0])
        both[1].append(column[1])
    assert both == [plain, special]
    assert special != answer(make_runner(model), 1, 20, params=SamplingParams())


def test_the_repetition_penalty_counts_prompt_and_answer() -> None:
    runner = make_runner(make_gpt())
    params = SamplingParams(temperature=1e-4, repetition_penalty=1e9)
    runner.start(0, params, key=row_key(1, 0), num_log_probs=None)
    runner.remember(0, [5])
    logits = torch.ones((1, VOCAB))
    logits[0, 5], logits[0, 9], logits[0, 11] = 9.0, 8.0, 7.0
    assert runner.sample_first([0], logits, [1], [5]).tokens == [[9]]
    assert runner.sample_first([0], logits, [2], [9]).tokens == [[11]]


def test_log_probs_are_reported_and_change_no_token() -> None:
    model = make_gpt()
    plain = answer(make_runner(model), 0, 6)
    runner = make_runner(model)
    runner.start(0, DRAW, key=row_key(0, 3), num_log_probs=2)
    logits = runner.prefill([chunk(0, PROMPTS[0], 0, 23)])
    first = runner.sample_first([0], logits, [23], [PROMPTS[0][-1]])
    rest = runner.decode([0], [LENGTH], 5)()
    assert [first.tokens[0][0], *(column[0] for column in rest.tokens)] == plain
    output = first.log_probs[0][0]
    assert output is not None
    expected = torch.log_softmax(logits[0], dim=0)
    assert output.chosen == pytest.approx(float(expected[plain[0]]), abs=1e-6)
    assert [token for token, _ in output.top] == expected.topk(2).indices.tolist()
    assert all(column[0] is not None for column in rest.log_probs)


@pytest.mark.parametrize("params", [DRAW, SamplingParams(temperature=0.9, top_k=20, min_p=1e-6)])
def test_a_park_token_parks_and_a_parked_slot_changes_nothing(params: SamplingParams) -> None:
    model = make_gpt()
    free = answer(make_runner(model), 0, 20, params=params)
    stop = free[8]
    at = free.index(stop)
    runner = make_runner(model, stop_tokens=(stop, 10**6))
    assert begin(runner, 0, params=params) == free[0]
    output = [column[0] for column in runner.decode([0], [LENGTH], 15)().tokens]
    assert output == [*free[1 : at + 1], *[-1] * (15 - at)]
    assert runner.length[0] == len(PROMPTS[0]) + at
    pools = [pool.clone() for pool in runner._pools]
    assert runner.decode([0], [LENGTH], 2)().tokens == [[-1], [-1]]
    assert all(torch.equal(*pair) for pair in zip(pools, runner._pools, strict=True))


@pytest.mark.parametrize("params", [DRAW, SamplingParams(temperature=0.9, top_k=20, min_p=1e-6)])
def test_a_slot_parks_when_its_text_is_as_long_as_it_may_be(params: SamplingParams) -> None:
    runner = make_runner(make_gpt())
    begin(runner, 0, params=params)
    begin(runner, 2, params=params)
    output = runner.decode([0, 2], [27, LENGTH], 6)().tokens
    # 23 of prompt and one drawn; three more make 27. All are told, the last is not read.
    assert [column[0] == -1 for column in output] == [False] * 3 + [True] * 3
    assert all(column[1] >= 0 for column in output)
    assert runner.length[0] == 26
    begin(runner, 0, params=params)
    assert runner.decode([0], [24], 1)().tokens == [[-1]]  # it is full as it is


def test_a_released_slot_is_parked_and_a_started_one_waits_for_its_first_token() -> None:
    runner = make_runner(make_gpt())
    begin(runner, 0)
    runner.release(0)
    assert runner.decode([0], [LENGTH], 1)().tokens == [[-1]]
    begin(runner, 0)
    runner.start(0, DRAW, key=row_key(1, 1), num_log_probs=None)
    assert runner.decode([0], [LENGTH], 1)().tokens == [[-1]]


def test_a_forced_token_is_read_as_if_it_had_been_drawn() -> None:
    model = make_gpt()
    runner = make_runner(model)
    first = begin(runner, 0)
    tokens = [*PROMPTS[0], first, 44, 45]
    logits = runner.prefill([chunk(0, tokens, 23, 26)])
    sampled = runner.sample_first([0], logits, [26], [45]).tokens[0][0]
    runner.decode([0], [LENGTH], 1)
    after = runner.prefill([chunk(0, [*tokens, sampled, 46], 27, 28)])
    assert torch.equal(after, read(make_runner(model), 3, [*tokens, sampled, 46]))
