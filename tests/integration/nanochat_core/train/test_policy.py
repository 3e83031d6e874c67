"""What RL learns from: advantages, groups that teach nothing, and the objective's gradients, which
are held against a model and an objective written from their formulas in float64."""

import pytest
import torch

from flows.profiles import open_profile
from nanochat_core import scaling
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.train import policy
from nanochat_core.train.policy import (
    ReferenceLogProbs,
    Rollout,
    advantages_of,
    count_sampled,
    log_probs,
    micro_batches,
    pad,
    policy_loss,
)
from tests.support.nanochat_core.optim.ranks import gradients_of as sums_of
from tests.support.nanochat_core.random_gpt import shape_of
from tests.support.nanochat_core.train import recipe_reference

pytestmark = pytest.mark.torch
CONFIG = shape_of(16, 16, 32, width=32, num_heads=2, vocab_size=64)
RECIPE = recipe_reference.Recipe(num_steps=1, total_batch_size=1, tokens=1, reference_tokens=1)
CLIP, KL_WEIGHT = 0.1, 0.3


def small_model(seed=2, *, precision="fp32"):
    """Every weight is random; each seed is another model, not far from the others."""
    model = GPT(CONFIG, scaling.numerics(precision))
    model.init_weights(1)
    generator, change = torch.Generator().manual_seed(1), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
            parameter.add_(torch.randn(parameter.shape, generator=change) * 0.01)
    return model


def rollout(prompt, answer, mask, advantage, reward=0.0):
    return Rollout(prompt=prompt, answer=answer, mask=mask, reward=reward, advantage=advantage)


ROLLOUTS = [
    rollout([1, 2, 3], [4, 5, 6, 7], [1, 1, 0, 1], 0.75),
    rollout([1, 2, 3], [9, 8], [1, 1], -0.25),
    rollout([5, 1], [3, 3, 3, 3, 3], [1, 0, 0, 1, 1], 0.0),
    rollout([7], [11, 12, 13], [1, 1, 1], -0.5),
    rollout([7], [], [], 0.25),
]


def gradients_of(model, ref_log_probs, *, device_batch_size=2):
    rates = open_profile("tiny").run.optimizer
    optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
    num_tokens = count_sampled(ROLLOUTS, ALONE, torch.device("cpu"))
    model.train()
    batches = micro_batches(ROLLOUTS, ref_log_probs, device_batch_size=device_batch_size)
    for ids, last in batches:
        loss = policy_loss(model, ROLLOUTS, ids, ref_log_probs, num_tokens)
        optimizer.backward(loss, last=last)
    gradients = {name: g.clone() for name, g in sums_of(optimizer).items()}
    return gradients, float(optimizer.start_reduce_scatter())


def double(model):
    return {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}


def logp_in_double(weights, r):
    """log p of each token of the answer."""
    ids = torch.tensor([r.prompt + r.answer])
    logits = recipe_reference.forward(weights, ids[:, :-1], CONFIG, RECIPE)[0]
    logp = logits - logits.exp().sum(-1, keepdim=True).log()
    return logp.gather(1, ids[0, 1:, None])[len(r.prompt) - 1 :, 0]


def expected_gradients(model, *, old, clip, reference, kl_weight):
    """Gradients, value and the ratios of the objective, token by token, all in float64."""
    weights, total, count = double(model), torch.zeros((), dtype=torch.float64), 0
    ratios = []
    for r in ROLLOUTS:
        if not r.answer:
            continue
        now = logp_in_double(weights, r)
        with torch.no_grad():
            before = now if old is None else logp_in_double(double(old), r)
            wanted = now if reference is None else logp_in_double(double(reference), r)
        for i, counts in enumerate(r.mask):
            if not counts:
                continue
            count += 1
            ratio = torch.exp(now[i] - before[i].detach())
            cut = min(max(ratio.item(), 1 - clip), 1 + clip)
            gain = ratio * r.advantage
            if cut * r.advantage < gain.item():
                gain = torch.tensor(cut * r.advantage, dtype=torch.float64)
            other = torch.exp(wanted[i].detach() - now[i])
            total = total - gain + kl_weight * (other - torch.log(other) - 1)
            ratios.append(ratio.item())
    value = total / count
    value.backward()
    grads = {k: v.grad for k, v in weights.items()}
    return {k: v for k, v in grads.items() if v is not None}, value.item(), ratios


def assert_close(ours, expected):
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        scale = expected[name].abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            gradient.double(), expected[name].double(), rtol=1e-4, atol=1e-5 * scale, msg=name
        )


@pytest.mark.parametrize("device_batch_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "with a reference", "clipped too"])
def test_gradients_are_those_of_the_formula_in_float64(kind, device_batch_size):
    model = small_model()
    old = small_model(3) if kind == "clipped too" else None
    reference = None if kind == "plain" else small_model(4)
    weight = 0.0 if reference is None else KL_WEIGHT
    held = reference and ReferenceLogProbs(
        old=old and log_probs(old, ROLLOUTS, device_batch_size=2),
        reference=log_probs(reference, ROLLOUTS, device_batch_size=3),
        clip=CLIP,
        kl_weight=weight,
    )
    expected, value, ratios = expected_gradients(
        model, old=old, clip=CLIP, reference=reference, kl_weight=weight
    )
    if old is not None:  # on both sides of the clip, and inside it
        assert min(ratios) < 1 - CLIP < max(r for r in ratios if r < 1)
        assert min(r for r in ratios if r > 1) < 1 + CLIP < max(ratios)
    ours, objective = gradients_of(model, held, device_batch_size=device_batch_size)
    assert_close(ours, expected)
    if reference is not None:
        assert objective == pytest.approx(value, rel=1e-4)


def test_rows_that_are_padded_to_a_gpus_lengths_give_the_same_gradient(monkeypatch):
    shapes = []

    def padded(model, batch):
        tokens, targets = pad(batch, model.config.sequence_len, multiple=8)
        shapes.append(tokens.shape)
        return tokens, targets

    logp = log_probs(small_model(3), ROLLOUTS, device_batch_size=2)
    ref_log_probs = ReferenceLogProbs(old=logp, reference=logp, clip=CLIP, kl_weight=KL_WEIGHT)
    plain = gradients_of(small_model(), ref_log_probs, device_batch_size=2)[0]
    monkeypatch.setattr(policy, "pad_for", padded)
    wider = gradients_of(small_model(), ref_log_probs, device_batch_size=2)[0]
    assert {shape[1] % 8 for shape in shapes} == {0}
    for name in plain:
        torch.testing.assert_close(wider[name], plain[name], rtol=1e-4, atol=1e-6)


def test_a_length_is_padded_to_the_models_at_most():
    rollout = ROLLOUTS[0]
    length = len(rollout.prompt) + len(rollout.answer) - 1
    for longest in (length, length + 3, 200):
        tokens, targets = pad([rollout], longest, multiple=128)
        assert tokens.shape == targets.shape == (1, min(longest, 128))


def test_log_probs_of_a_model_in_bf16_are_those_of_a_training_pass():
    """So that ratios begin at 1."""
    model, batch = small_model(precision="bf16"), ROLLOUTS[:1]
    tokens, targets = pad(batch, model.config.sequence_len)
    begin = len(batch[0].prompt) - 1
    (found,) = log_probs(model, batch, device_batch_size=1)
    assert torch.equal(found, -model.token_losses(tokens, targets)[0, begin:].detach())
    with torch.no_grad():
        rounded = -model.token_losses(tokens, targets)[0, begin:]
    assert not torch.equal(found, rounded)


def test_an_advantage_is_the_reward_less_the_mean_of_the_group_or_of_the_others():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert advantages_of(rewards, "group_mean") == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])
    others = [sum(rewards[:i] + rewards[i + 1 :]) / 4 for i in range(5)]
    expected = [reward - other for reward, other in zip(rewards, others, strict=True)]
    assert advantages_of(rewards, "leave_one_out") == pytest.approx(expected)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_a_group_of_equals_has_no_advantage_at_all(baseline, reward):
    assert advantages_of([reward] * 7, baseline) == [0.0] * 7
