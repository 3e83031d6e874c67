"""Both Muons and AdamW against plain arithmetic in float64."""

import math

import pytest
import torch

from nanochat_core.optim import adamw, muon
from nanochat_core.optim.adamw import adamw_
from nanochat_core.optim.groups import adamw_groups
from nanochat_core.optim.january import clip_factor, newton_schulz_muon_, squared_norm
from nanochat_core.optim.muon import muon_, second_moment_shape
from nanochat_core.scaling import run_for_depth
from nanochat_core.scaling_january import january_run
from nanochat_core.train.chat import scaled
from tests.support.nanochat_core.train.recipe_reference import muon_step

pytestmark = pytest.mark.torch
GROUPS = adamw_groups(run_for_depth(12).optimizer)


@pytest.fixture(params=["on a CPU", "on a GPU"])
def scalars(request, monkeypatch):
    """Numbers of a step are floats on a CPU, and tensors on a GPU."""
    if request.param == "on a GPU":
        for module in (adamw, muon):
            tensors = lambda device, *values: torch.tensor(values, device=device).unbind()  # noqa: E731
            monkeypatch.setattr(module, "scalars", tensors)


def reference_newton_schulz(weight, grad, kept, lr, mu, decay):
    rows, cols = weight.shape
    kept[0] = mu * kept[0] + (1 - mu) * grad
    y = (1 - mu) * grad + mu * kept[0]
    y = y.T if rows > cols else y
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    y = y.T if rows > cols else y
    return weight - lr * math.sqrt(max(1.0, rows / cols)) * y


class Polar:
    """Today's Muon on stacks of matrices, all of whose state is zero at first."""

    reference = staticmethod(muon_step)

    def __init__(self, *shape):
        self.momentum = torch.zeros(shape)
        self.second_moment = torch.zeros(shape[0], *second_moment_shape(*shape[1:]))

    def step(self, weights, grads, *, lr=0.02, mu=0.85, decay=0.1, dtype=torch.float32):
        state = (self.momentum, self.second_moment)
        muon_(weights, grads.clone(), *state, lr=lr, mu=mu, weight_decay=decay, dtype=dtype)


class NewtonSchulz(Polar):
    """January's, which decays nothing."""

    reference = staticmethod(reference_newton_schulz)

    def step(self, weights, grads, *, lr=0.02, mu=0.85, decay=0.0, dtype=torch.float32):
        newton_schulz_muon_(weights, grads.clone(), self.momentum, lr=lr, mu=mu, dtype=dtype)


every_muon = pytest.mark.parametrize("kind", [Polar, NewtonSchulz])


@every_muon
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (24, 24), (3, 12), (12, 3)])
@pytest.mark.usefixtures("scalars")
def test_muon_is_its_formula_over_several_steps(kind, shape):
    generator = torch.Generator().manual_seed(shape[0])
    weights, rule = torch.randn(2, *shape, generator=generator), kind(2, *shape)
    expected = [w.double() for w in weights]
    zeros = (torch.zeros(shape), torch.zeros(second_moment_shape(*shape)))
    states = [[z.double() for z in zeros] for _ in weights]
    for step in range(5):
        grads = torch.randn(2, *shape, generator=generator) * 10.0 ** (1 - step)
        mu, decay, lr = 0.85 + 0.02 * step, 0.5 - 0.1 * step, 0.02 * (1 + step)
        expected = [
            kind.reference(w, g.double(), s, lr, mu, decay)
            for w, g, s in zip(expected, grads, states, strict=True)
        ]
        rule.step(weights, grads, lr=lr, mu=mu, decay=decay)
        torch.testing.assert_close(weights.double(), torch.stack(expected), atol=2e-6, rtol=0)
    wanted = torch.stack([kept[0] for kept in states])
    torch.testing.assert_close(rule.momentum.double(), wanted, atol=2e-6, rtol=0)
    if kind is Polar:
        wanted = torch.stack([kept[1] for kept in states])
        torch.testing.assert_close(rule.second_moment.double(), wanted, atol=1e-6, rtol=1e-5)


@every_muon
@pytest.mark.parametrize(("factor", "decay"), [(0.0, 0.1), (1.0, 0.0)])
def test_muon_leaves_a_matrix_without_gradient_where_it_is(kind, factor, decay):
    start = factor * torch.arange(64.0).view(2, 8, 4)
    weights = start.clone()
    kind(2, 8, 4).step(weights, torch.zeros(2, 8, 4), decay=decay)
    assert torch.equal(weights, start)


@every_muon
def test_muon_in_bf16_steps_in_nearly_the_same_direction(kind):
    grads = torch.randn(3, 32, 16, generator=torch.Generator().manual_seed(4))
    updates = torch.zeros(2, 3, 32, 16)
    for weights, dtype in zip(updates, (torch.float32, torch.bfloat16), strict=True):
        kind(3, 32, 16).step(weights, grads, lr=1.0, mu=0.9, decay=0.0, dtype=dtype)
    assert torch.cosine_similarity(*updates.flatten(1), dim=0) > 0.999


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.prefixes[0])
def test_adamw_is_its_formula_over_several_steps(group):
    generator = torch.Generator().manual_seed(5)
    shapes = [(40, 8), (7,), (1,)]
    parameters = [torch.randn(s, generator=generator) for s in shapes]
    exp_avg, exp_avg_sq = ([torch.zeros(s) for s in shapes] for _ in "mv")
    expected = [p.double() for p in parameters]
    m, v = ([torch.zeros(s).double() for s in shapes] for _ in "mv")
    for step in range(1, 6):
        grads = [torch.randn(s, generator=generator) for s in shapes]
        lr = 0.03 / step
        for i, grad in enumerate(g.double() for g in grads):
            p = expected[i] * (1 - lr * group.weight_decay)
            m[i] = group.beta1 * m[i] + (1 - group.beta1) * grad
            v[i] = group.beta2 * v[i] + (1 - group.beta2) * grad * grad
            corrected = (v[i] / (1 - group.beta2**step)).sqrt() + 1e-10
            expected[i] = p - lr / (1 - group.beta1**step) * m[i] / corrected
        adamw_(parameters, grads, exp_avg, exp_avg_sq, step=step, lr=lr, group=group)
        for actual, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(actual.double(), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["torch's", "ours"])
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.prefixes[0])
@pytest.mark.usefixtures("scalars")
def test_adamw_of_a_bf16_table_is_its_formula_in_fp32_rounded_when_stored(group, dtype):
    generator = torch.Generator().manual_seed(6)
    shape, lr, step = (64, 16), 0.3, 3
    p, g, m, v = (torch.randn(shape, generator=generator).bfloat16() for _ in "pgmv")
    g, v = torch.randn(shape, generator=generator).to(dtype), v.square()
    moved = [t.clone() for t in (p, g, m, v)]
    adamw_(*([t] for t in moved), step=step, lr=lr, group=group)
    p, g, m, v = (t.float() for t in (p, g, m, v))
    m = group.beta1 * m + (1 - group.beta1) * g
    v = group.beta2 * v + (1 - group.beta2) * g * g
    corrected = v.sqrt() / math.sqrt(1 - group.beta2**step) + 1e-10
    p = p * (1 - lr * group.weight_decay) - lr / (1 - group.beta1**step) * m / corrected
    for actual, wanted in zip((moved[0], *moved[2:]), (p, m, v), strict=True):
        assert actual.dtype == torch.bfloat16
        # Another order of fp32 operations may tip a value to its neighbour, 2^-7 away at most.
        equal = actual == wanted.bfloat16()
        assert equal.float().mean() > 0.99
        torch.testing.assert_close(actual.float(), wanted, rtol=2**-7, atol=1e-6)


# January's clipping.


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
