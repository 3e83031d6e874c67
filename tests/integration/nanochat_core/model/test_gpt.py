"""The forward pass against its formulas in float64, and what training relies on."""

import dataclasses
import math

import pytest
import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import numerics
from tests.support.nanochat_core.random_gpt import randomise, shape_of

pytestmark = pytest.mark.torch

CONFIG = shape_of(5, 7, 31, 2, 32, vocab_size=100)
FP32 = numerics("fp32")


def noisy_model(config=CONFIG, constants=FP32):
    """Every parameter random, so that nothing hides behind a zero projection."""
    return randomise(GPT(config, constants), seed=2, std=0.15)


def tokens_of(rows, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (rows, length), generator=generator)


def test_losses_and_gradients_are_those_of_the_logits():
    model = noisy_model()
    tokens, targets = tokens_of(3, 20), tokens_of(3, 20, seed=4)
    targets[0, 5:] = -1
    targets[2] = -1
    weights = torch.rand(3, 20, generator=torch.Generator().manual_seed(5))
    plain = torch.nn.functional.cross_entropy(
        model(tokens).transpose(1, 2), targets, ignore_index=-1, reduction="none"
    )
    (plain * weights).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    losses = model.token_losses(tokens, targets)
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses, plain, atol=2e-6, rtol=0)
    assert torch.equal(losses == 0, targets == -1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-5, rtol=1e-4, msg=name)


def test_a_batch_without_targets_has_zero_loss_and_gradients():
    model = noisy_model()
    losses = model.token_losses(tokens_of(2, 8), torch.full((2, 8), -1))
    losses.sum().backward()
    assert torch.equal(losses, torch.zeros(2, 8))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_initial_weights_follow_the_recipe():
    config = dataclasses.replace(CONFIG, width=128, vocab_size=2000, num_kv_heads=4)
    with torch.device("meta"):
        model = GPT(config, FP32)
    model.to_empty(device="cpu")
    model.init_weights(42)
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    bound = math.sqrt(3 / 128)
    assert p["transformer.wte.weight"].std() == pytest.approx(0.8, rel=0.02)
    assert p["lm_head.weight"].std() == pytest.approx(0.001, rel=0.02)
    uniform = [(f"transformer.h.3.attn.c_{x}.weight", bound) for x in "qkv"]
    uniform += [("transformer.h.1.mlp.c_fc.weight", 0.4 * bound), ("value_embeds.4.weight", bound)]
    for name, edge in uniform:
        assert 0.98 * edge < p[name].max() <= edge
        assert -edge <= p[name].min() < -0.98 * edge
        assert p[name].std() == pytest.approx(edge / math.sqrt(3), rel=0.03)
    for name in ("transformer.h.0.attn.ve_gate.weight", "smear_gate.weight"):
        assert 0 <= p[name].min() < p[name].max() <= 0.02
    for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_proj.weight"):
        assert not p[name].any()
    torch.testing.assert_close(p["resid_lambdas"], torch.tensor([1.15, 1.125, 1.1, 1.075, 1.05]))
    torch.testing.assert_close(p["x0_lambdas"], torch.tensor([0.2, 0.1625, 0.125, 0.0875, 0.05]))
    assert float(p["smear_lambda"]) == 0.0
    assert float(p["backout_lambda"]) == pytest.approx(0.2)


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(0)
    one, two, other = GPT(CONFIG, FP32), GPT(CONFIG, FP32), GPT(CONFIG, FP32)
    one.init_weights(42)
    torch.randn(5)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)  # drawn by so many threads
    try:
        two.init_weights(42)
    finally:
        torch.set_num_threads(threads)
    other.init_weights(43)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name
    name = "transformer.h.0.attn.c_q.weight"
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    layers = [one.state_dict()[f"transformer.h.{i}.attn.c_q.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_rows_longer_than_the_rotary_table_grow_it():
    config = dataclasses.replace(CONFIG, sequence_len=2, windows=(1, 1, 1, 1, 2))
    model, other = noisy_model(config), noisy_model(config)
    tokens = tokens_of(1, 30)
    model(tokens[:, :8])
    torch.testing.assert_close(model(tokens), other(tokens), atol=0, rtol=0)


def test_a_model_is_allocated_without_what_imports_sympy(monkeypatch):
    """That import takes longer than all else between torch's and a job's first step."""

    def fail(*args, **kwargs):
        raise AssertionError("of a meta tensor this imports torch's symbolic shapes")

    with torch.device("meta"):
        model = GPT(CONFIG, FP32)
    monkeypatch.setattr(torch, "empty_like", fail)
    model.to_empty(device="cpu").init_weights(1)
    assert all(parameter.requires_grad for parameter in model.parameters())
