"""January's Newton-Schulz iteration and clipping, against torch's."""

import dataclasses

import pytest
import torch

from nanochat_core.errors import ConfigError
from nanochat_core.optim.january import clip_factor, newton_schulz, squared_norm
from nanochat_core.scaling import run_for_depth
from nanochat_core.scaling_january import january_run
from nanochat_core.train.chat import scaled

pytestmark = pytest.mark.torch

SHAPES = [(48, 16), (16, 48), (24, 24), (3, 12), (12, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_brings_singular_values_near_one_and_turns_nothing(shape):
    matrix = torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inside = u.mT @ newton_schulz(matrix) @ v.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert (values - 0.9).abs().max() < 0.35
    torch.testing.assert_close(inside, torch.diag_embed(values), atol=1e-5, rtol=0)


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
