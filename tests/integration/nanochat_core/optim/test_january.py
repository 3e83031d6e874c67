"""January's Newton-Schulz iteration and clipping, against torch's."""

import dataclasses

import pytest
import torch

from nanochat_core.errors import ConfigError
from nanochat_core.optim.january import clip_factor, squared_norm
from nanochat_core.scaling import run_for_depth
from nanochat_core.scaling_january import january_run
from nanochat_core.train.chat import scaled

pytestmark = pytest.mark.torch


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
