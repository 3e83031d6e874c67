"""January's Muon and clipping against plain float64 arithmetic, and against torch."""

import dataclasses
import math

import pytest
import torch

from nanochat_core.errors import ConfigError
from nanochat_core.optim.january import (
    clip_factor,
    newton_schulz,
    newton_schulz_muon_,
    squared_norm,
)
from nanochat_core.scaling import run_for_depth
from nanochat_core.scaling_january import january_run
from nanochat_core.train.chat import scaled

pytestmark = pytest.mark.torch

SHAPES = [(48, 16), (16, 48), (24, 24), (3, 12), (12, 3)]


def reference(weight, grad, momentum, *, lr, mu):
    """The weight and the momentum after one step, all float64."""
    rows, cols = weight.shape
    momentum = mu * momentum + (1 - mu) * grad
    y = (1 - mu) * grad + mu * momentum
    if rows > cols:
        y = y.T
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    if rows > cols:
        y = y.T
    return weight - lr * math.sqrt(max(1.0, rows / cols)) * y, momentum


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_muon_is_its_formula_over_several_steps(shape):
    generator = torch.Generator().manual_seed(shape[0])
    weights = torch.randn(2, *shape, generator=generator)
    momentum = torch.zeros(2, *shape)
    expected, moved = list(weights.double()), [torch.zeros(shape).double() for _ in "ab"]
    for step in range(5):
        grads = torch.randn(2, *shape, generator=generator) * 10.0 ** (1 - step)
        mu, lr = 0.85 + 0.02 * step, 0.02 * (1 + step)
        for i in range(2):
            expected[i], moved[i] = reference(
                expected[i], grads[i].double(), moved[i], lr=lr, mu=mu
            )
        newton_schulz_muon_(weights, grads.clone(), momentum, lr=lr, mu=mu, dtype=torch.float32)
        torch.testing.assert_close(weights.double(), torch.stack(expected), atol=2e-6, rtol=0)
        torch.testing.assert_close(momentum.double(), torch.stack(moved), atol=2e-6, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_brings_singular_values_near_one_and_turns_nothing(shape):
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.mT @ newton_schulz(matrix) @ v.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert (values - 0.9).abs().max() < 0.35
    torch.testing.assert_close(inside, torch.diag_embed(values), atol=1e-5, rtol=0)


def test_newton_schulz_muon_moves_nothing_that_has_no_gradient():
    start = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
    weights = start.clone()
    zeros = torch.zeros(2, 8, 4)
    newton_schulz_muon_(weights, zeros.clone(), zeros, lr=0.02, mu=0.85, dtype=torch.float32)
    assert torch.equal(weights, start)


def test_newton_schulz_muon_in_bf16_steps_in_nearly_the_same_direction():
    grads = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(4))
    updates = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = torch.zeros(3, 32, 16)
        momentum = torch.zeros(3, 32, 16)
        newton_schulz_muon_(weights, grads.clone(), momentum, lr=1.0, mu=0.9, dtype=dtype)
        assert weights.dtype == torch.float32
        updates.append(weights.flatten())
    assert torch.cosine_similarity(updates[0], updates[1], dim=0) > 0.999


@pytest.mark.parametrize("size", [0.01, 3.0])
def test_clipping_is_torchs_over_all_gradients_at_once(size):
    generator = torch.Generator().manual_seed(5)
    grads = [size * torch.randn(shape, generator=generator) for shape in ((7, 5), (3,), (1,))]
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    # as two ranks would: each has some of the pieces
    mine = (squared_norm(grads[:1]) + squared_norm(grads[1:])).sqrt()
    torch.testing.assert_close(mine, norm)
    factor = clip_factor(mine, 1.0)
    assert (float(factor) == 1.0) == (size == 0.01)
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(grad * factor, parameter.grad)


def test_a_broken_norm_stays_broken():
    assert clip_factor(torch.tensor(float("nan")), 1.0).isnan()


def test_the_norm_of_bf16_gradients_is_summed_in_fp32():
    grad = torch.full((4096, 16), 0.01).bfloat16()
    exact = grad.double().square().sum()
    torch.testing.assert_close(squared_norm([grad]).double(), exact, rtol=1e-5, atol=0)


def test_stages_after_pretraining_clip_nothing():
    config = january_run(20).optimizer
    later = scaled(config, 0.5)
    assert (config.grad_clip, later.grad_clip) == (1.0, None)
    assert later.muon_lr == config.muon_lr / 2
    assert (later.muon, later.lm_head_beta2) == (config.muon, config.lm_head_beta2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"muon": "adam"}, "optimizer.muon is 'adam'"),
        ({"muon": "newton_schulz"}, "muon_weight_decay is 0.28, and newton_schulz decays nothing"),
        ({"grad_clip": 0.0}, "optimizer.grad_clip is 0.0, expected more than 0"),
    ],
)
def test_a_wrong_optimizer_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(run_for_depth(12).optimizer, **change)
