"""Every rule of `SamplingParams`, alone and together, against plain arithmetic in float64."""

import itertools
import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat_core.engine import sampling
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.sampling import (
    SamplingRows,
    candidates_of,
    row_key,
    sample,
    sample_each,
    sample_rows,
    uniforms,
)

pytestmark = pytest.mark.torch

VOCAB = 40
CPU = torch.device("cpu")
ALL_PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p)
    for t, k, p in itertools.product((0.0, 0.7, 1.3), (None, 5), (1.0, 0.6, 0.95))
]


def share_of_each(logits, params):
    """Return the distribution that is sampled from, in the order in which a token is picked."""
    if params.temperature == 0:
        return {max(range(len(logits)), key=lambda i: (logits[i], -i)): 1.0}
    top = max(logits)
    weights = {i: math.exp((z - top) / params.temperature) for i, z in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
        for i in ranked:
            if mass >= params.top_p * total:
                break
            kept.append(i)
            mass += weights[i]
        ranked = kept
    order = ranked if params.top_k or params.top_p < 1 else sorted(ranked)
    total = sum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


def pick(shares, number):
    """The token whose part of the unit interval `number` is in, and how far from its edges."""
    low = 0.0
    for token, share in shares.items():
        if number < low + share:
            return token, min(number - low, low + share - number)
        low += share
    raise AssertionError(number)


def keys_of(seed, count):
    return torch.tensor([row_key(seed, i) for i in range(count)])


def make_rows(count):
    """Return logits (B, V), keys and positions."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(count, VOCAB, generator=generator)
    return logits, keys_of(3, count), torch.arange(count) % 7


@pytest.mark.parametrize("params", ALL_PARAMS, ids=str)
def test_each_rule_gives_what_plain_arithmetic_gives(params):
    logits, keys, positions = make_rows(60)
    sampled = sample_each(logits, keys, positions, [params] * 60).tolist()
    numbers = uniforms(keys, positions).tolist()
    compared = 0
    for row, token in enumerate(sampled):
        expected, margin = pick(share_of_each(logits[row].tolist(), params), numbers[row])
        if margin > 1e-5:  # nearer, rounding decides
            compared += 1
            assert token == expected
    assert compared > 50 or params.temperature == 0


def test_settings_as_tensors_draw_what_settings_of_rows_draw():
    rng = random.Random(1)
    logits, keys, positions = make_rows(500)
    all_params = [rng.choice(ALL_PARAMS) for _ in range(500)]
    rows = SamplingRows.of(all_params, vocab_size=VOCAB, device=CPU)
    expected = sample_each(logits, keys, positions, all_params)
    got = sample_rows(logits, keys, positions, rows, num_candidates=VOCAB)
    assert torch.equal(got, expected)
    few = [d for d in all_params if d.top_k is not None or d.top_p == 1.0]
    at = [i for i, d in enumerate(all_params) if d in few]
    rows = SamplingRows.of([all_params[i] for i in at], vocab_size=VOCAB, device=CPU)
    got = sample_rows(logits[at], keys[at], positions[at], rows, num_candidates=8)
    assert torch.equal(got, expected[at])


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_a_tiny_top_p_leaves_the_likeliest(top_p):
    logits, keys, positions = make_rows(50)
    sampled = sample(logits, keys, positions, SamplingParams(temperature=2.0, top_p=top_p))
    assert torch.equal(sampled, logits.argmax(dim=-1))


def test_a_row_without_a_top_k_has_the_vocabulary_as_candidates():
    assert [
        candidates_of(SamplingParams(top_k=k), VOCAB) for k in (None, 0, -1, 7, VOCAB, 999)
    ] == [VOCAB, VOCAB, VOCAB, 7, VOCAB, VOCAB]


def test_a_seed_gives_the_same_stream_in_every_version():
    """As SplitMix64 in numpy's uint64 gave them."""
    keys = {
        (0, 0): 5197578548964807871,
        (0, 299): -4650420716670618757,
        (-1, 0): 4922461756044938104,
        (42, 299): 5894742182107112757,
        (2**63 - 1, 0): -1886230925983937994,
        (-(2**63), 299): 3799403568114163241,
    }
    assert {one: row_key(*one) for one in keys} == keys
    numbers = uniforms(torch.tensor([row_key(42, 0)]), torch.tensor([0, 1, 1000]))
    assert (numbers * 2**23).tolist() == [6476479, 3201522, 8195861]


@pytest.mark.parametrize("numbers", [(), (0, 3)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0.0),
    ],
)
def test_what_is_not_a_number_is_not_drawn_and_never_gives_a_token_that_there_is_not(
    params, numbers
):
    logits = torch.full((200, 7), torch.nan)
    for token in numbers:
        logits[:, token] = 1.0
    positions = torch.arange(200)
    sampled = sample(logits, keys_of(7, 200), positions, params)
    rows = SamplingRows.of([params] * 200, vocab_size=7, device=logits.device)
    also = sample_rows(logits, keys_of(7, 200), positions, rows, num_candidates=7)
    for tokens in (sampled, also):
        assert 0 <= tokens.min() <= tokens.max() < 7
        if numbers:
            assert set(tokens.tolist()) <= set(numbers)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_temperature_that_fp32_does_not_hold_takes_the_likeliest(temperature, settings):
    logits = torch.tensor([0.0, 3.0, -1.0, 2.999]).expand(100, -1)
    params = SamplingParams(temperature=temperature, **settings)
    assert set(sample(logits, keys_of(7, 100), torch.arange(100), params).tolist()) == {1}


class _NoFloatSums(TorchDispatchMode):
    """Refuses what has no deterministic kernel on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cumsum.default:
            assert not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_sampling_adds_no_floats_in_an_order_that_a_gpu_varies():
    logits, positions = torch.randn(4, 30), torch.arange(4)
    settings = [{}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.7}, {"top_k": 9}]
    params = [SamplingParams(temperature=1.0, **some) for some in settings]
    rows = SamplingRows.of(params, vocab_size=30, device=torch.device("cpu"))
    with pytest.raises(AssertionError), _NoFloatSums():
        logits.cumsum(-1)
    with _NoFloatSums():
        each = sample_each(logits, keys_of(7, 4), positions, params)
        assert torch.equal(
            each, sample_rows(logits, keys_of(7, 4), positions, rows, num_candidates=30)
        )


def test_weights_are_drawn_exactly_in_proportion_to_their_units():
    # All weights 1, as many as fit: the sum needs 47 bits, its product with a number 70.
    vocab, count = 1 << 16, 1 << 23
    steps = torch.tensor([0, 1, 127, 128, count // 2 - 1, count // 2, count - 1])
    tokens = sampling._choose(torch.ones(len(steps), vocab), steps / count)
    assert tokens.tolist() == [step * vocab // count for step in steps.tolist()]
