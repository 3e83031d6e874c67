import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat_core.engine import sampling
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.sampling import (
    SamplingRows,
    row_key,
    sample,
    sample_each,
    sample_rows,
    uniforms,
)
from tests.support.nanochat_core.engine.row_keys import row_keys

pytestmark = pytest.mark.torch


def _keys(count):
    return row_keys(torch.full((count,), 7), torch.arange(count))


def _sample(logits, count, **settings):
    positions = torch.arange(count)
    return sample(logits.expand(count, -1), _keys(count), positions, SamplingParams(**settings))


def test_uniforms_fill_the_unit_interval_evenly():
    u = uniforms(_keys(20_000), torch.zeros(20_000, dtype=torch.int64))
    assert 0.0 <= u.min() < 0.001
    assert 0.999 < u.max() < 1.0
    counts = torch.histc(u, bins=20, min=0.0, max=1.0)
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


def test_the_key_of_a_row_is_splitmix64s_with_any_seed():
    for seed in (0, 1, -1, 42, 2**63 - 1, -(2**63)):
        keys = row_keys(torch.full((300,), seed), torch.arange(300))
        assert [row_key(seed, i) for i in range(300)] == keys.tolist()


def test_seed_sample_and_position_each_give_another_stream():
    keys = row_keys(torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0]))
    values = torch.stack([uniforms(keys, torch.full((3,), p)) for p in range(1000)])  # (1000, 3)
    assert len(values.flatten().unique()) > 2990
    correlation = torch.corrcoef(values.T) - torch.eye(3)
    assert correlation.abs().max() < 0.15
    lag = torch.corrcoef(torch.stack([values[1:, 0], values[:-1, 0]]))
    assert lag[0, 1].abs() < 0.15


def test_a_rows_number_does_not_depend_on_the_other_rows():
    keys, positions = _keys(50), torch.arange(50)
    alone = [uniforms(keys[i : i + 1], positions[i : i + 1]) for i in range(50)]
    assert torch.equal(uniforms(keys, positions), torch.cat(alone))


def test_tokens_come_as_often_as_the_softmax_says():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    expected = torch.softmax(logits / 0.7, dim=-1)
    sampled = _sample(logits, 40_000, temperature=0.7, top_k=None)
    shares = torch.bincount(sampled, minlength=4) / 40_000
    assert torch.allclose(shares, expected, atol=0.01)


def test_top_k_draws_from_the_k_likeliest_only():
    logits = torch.tensor([0.0, 3.0, -1.0, 2.0, 1.0])
    sampled = _sample(logits, 5_000, temperature=1.0, top_k=2)
    shares = torch.bincount(sampled, minlength=5) / 5_000
    expected = torch.softmax(torch.tensor([3.0, 2.0]), dim=-1)
    assert set(sampled.tolist()) == {1, 3}
    assert torch.allclose(shares[[1, 3]], expected, atol=0.03)


@pytest.mark.parametrize("top_k", [None, 0, -1, 5, 99])
def test_a_top_k_of_none_or_too_many_is_off(top_k):
    logits = torch.zeros(5)
    sampled = _sample(logits, 1_000, temperature=1.0, top_k=top_k)
    assert torch.equal(sampled, _sample(logits, 1_000, temperature=1.0, top_k=None))
    assert set(sampled.tolist()) == set(range(5))


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([0.0, 3.0, -1.0])
    assert set(_sample(logits, 100, temperature=0.0, top_k=None).tolist()) == {1}


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1000,), -1e4)
    logits[123] = logits[456] = 0.0
    sampled = _sample(logits, 10_000, temperature=1.0, top_k=None)
    assert set(sampled.tolist()) == {123, 456}


@pytest.mark.parametrize("numbers", [(), (0, 3)])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.5),
        SamplingParams(repetition_penalty=2.0),
        SamplingParams(temperature=0.0),
    ],
)
def test_what_is_not_a_number_is_not_drawn_and_never_gives_a_token_that_there_is_not(
    params, numbers
):
    logits = torch.full((200, 7), torch.nan)
    for token in numbers:
        logits[:, token] = 1.0
    positions, seen = torch.arange(200), torch.zeros(200, 7, dtype=torch.bool)
    sampled = sample(logits, _keys(200), positions, params, seen)
    rows = SamplingRows.of([params] * 200, vocab_size=7, device=logits.device)
    also = sample_rows(logits, _keys(200), positions, rows, num_candidates=7, seen=seen)
    for tokens in (sampled, also):
        assert 0 <= tokens.min() <= tokens.max() < 7
        if numbers:
            assert set(tokens.tolist()) <= set(numbers)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_temperature_that_fp32_does_not_hold_takes_the_likeliest(temperature, settings):
    logits = torch.tensor([0.0, 3.0, -1.0, 2.999])
    settings = {"top_k": None, **settings}
    assert set(_sample(logits, 100, temperature=temperature, **settings).tolist()) == {1}


class _NoFloatSums(TorchDispatchMode):
    """Refuses what has no deterministic kernel on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cumsum.default:
            assert not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_sampling_adds_no_floats_in_an_order_that_a_gpu_varies():
    logits, positions = torch.randn(4, 30), torch.arange(4)
    settings = [{}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.7}, {"min_p": 0.1}]
    params = [SamplingParams(temperature=1.0, **some) for some in settings]
    rows = SamplingRows.of(params, vocab_size=30, device=torch.device("cpu"))
    with pytest.raises(AssertionError), _NoFloatSums():
        logits.cumsum(-1)
    with _NoFloatSums():
        each = sample_each(logits, _keys(4), positions, params)
        assert torch.equal(each, sample_rows(logits, _keys(4), positions, rows, num_candidates=30))


def test_weights_are_drawn_exactly_in_proportion_to_their_units():
    # All weights 1, as many as fit: the sum needs 47 bits, its product with a number 70.
    vocab, count = 1 << 16, 1 << 23
    steps = torch.tensor([0, 1, 127, 128, count // 2 - 1, count // 2, count - 1])
    tokens = sampling._choose(torch.ones(len(steps), vocab), steps / count)
    assert tokens.tolist() == [step * vocab // count for step in steps.tolist()]
