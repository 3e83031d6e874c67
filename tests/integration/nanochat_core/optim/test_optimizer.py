"""The optimizer as a whole: which rule a parameter gets, and its state; see test_sharded.py."""

import copy
import dataclasses
import math
import weakref

import pytest
import torch

from nanochat_core.errors import ModelError
from nanochat_core.optim import sharded
from nanochat_core.optim.groups import adamw_groups, group_of
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from tests.support.nanochat_core.optim.ranks import (
    RATES,
    adding_lookups,
    gradients_of,
    make_model,
    train,
)

pytestmark = pytest.mark.torch

# a rate by which each group is recognised
RATE_NAMES = ("lm_head_lr", "embedding_lr", "value_embed_lr", "residual_lr", "x0_lr", "smear_lr")
RATE_OF = {name: number for number, name in enumerate(RATE_NAMES, 1)}


def test_each_parameter_has_one_rule():
    groups = adamw_groups(dataclasses.replace(RATES, **RATE_OF))
    rules = {name: group_of(name, groups) for name, _ in make_model().named_parameters()}
    assert all(name.startswith("transformer.h.") for name, rule in rules.items() if rule is None)
    constants = {
        name: (rule.lr, rule.beta1, rule.beta2, rule.weight_decay)
        for name, rule in rules.items()
        if rule is not None
    }
    assert constants == {
        "lm_head.weight": (1, 0.8, 0.96, 0.01),
        "transformer.wte.weight": (2, 0.8, 0.995, 0.001),
        "value_embeds.0.weight": (3, 0.8, 0.995, 0.01),
        "value_embeds.2.weight": (3, 0.8, 0.995, 0.01),
        "resid_lambdas": (4, 0.8, 0.95, 0.05),
        "x0_lambdas": (5, 0.96, 0.95, 0.0),
        "smear_gate.weight": (6, 0.8, 0.95, 0.0),
        "smear_lambda": (6, 0.8, 0.95, 0.0),
        "backout_lambda": (6, 0.8, 0.95, 0.0),
    }


def test_a_step_consumes_the_gradients():
    model = make_model()
    optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
    train(optimizer, model, ALONE, range(1))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(AssertionError, match="gradient"):
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)


def test_state_is_keyed_by_parameter():
    model = make_model("bf16")
    state = Optimizer(model, RATES, precision="bf16", world=ALONE).pieces()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes["step"] == ()
    assert shapes["momentum/transformer.h.0.mlp.c_fc.weight"] == (128, 32)
    assert shapes["second_moment/transformer.h.0.mlp.c_fc.weight"] == (128, 1)
    assert shapes["second_moment/transformer.h.0.mlp.c_proj.weight"] == (1, 128)
    assert state["exp_avg/transformer.wte.weight"].dtype == torch.bfloat16
    assert state["exp_avg_sq/lm_head.weight"].dtype == torch.float32
    assert state["weight/lm_head.weight"].dtype == torch.float32
    assert len(state) == 1 + 3 * len(list(model.parameters()))


def test_state_that_does_not_fit_is_refused():
    optimizer = Optimizer(make_model(), RATES, precision="fp32", world=ALONE)
    state = optimizer.gather()
    with pytest.raises(ModelError, match="x0_lambdas has shape"):
        optimizer.load((state | {"exp_avg/x0_lambdas": torch.zeros(7)}).__getitem__)
    wrong = {"momentum/transformer.h.1.attn.c_q.weight": torch.zeros(32, 31)}
    with pytest.raises(ModelError, match=r"c_q.weight has shape .*needs \(32, 32\)"):
        optimizer.load((state | wrong).__getitem__)


def with_gradients(rates, gradients):
    """The masters after one step with these gradients."""
    model = make_model()
    optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient.clone()
    optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)
    return optimizer.gather()


def test_the_whole_gradient_is_clipped_to_a_norm():
    generator = torch.Generator().manual_seed(3)
    named = make_model().named_parameters()
    gradients = {name: torch.randn(p.shape, generator=generator) for name, p in named}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    clipped = dataclasses.replace(RATES, grad_clip=norm / 4)
    quarter = {name: g / 4 for name, g in gradients.items()}
    actual, expected = with_gradients(clipped, gradients), with_gradients(RATES, quarter)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-6, msg=key)
    wide = dataclasses.replace(RATES, grad_clip=norm * 4)
    actual, expected = with_gradients(wide, gradients), with_gradients(RATES, gradients)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_in_bf16_gradients_of_micro_steps_add_up_in_fp32():
    model = make_model("bf16")
    optimizer = Optimizer(model, RATES, precision="bf16", world=ALONE)
    expected = {}
    for step in range(16):
        tokens = torch.randint(60, (1, 17), generator=torch.Generator().manual_seed(step))
        loss = model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum()
        optimizer.backward(loss, last=step == 15)
        alone = make_model("bf16")
        Optimizer(alone, RATES, precision="bf16", world=ALONE)
        alone.token_losses(tokens[:, :-1], tokens[:, 1:]).sum().backward()
        for name, parameter in alone.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad.float()
    for name, gradient in gradients_of(optimizer).items():
        assert gradient.dtype == torch.float32, name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_in_bf16_the_model_works_with_rounded_masters_and_embeddings_are_their_own():
    model = make_model("bf16")
    optimizer = Optimizer(model, RATES, precision="bf16", world=ALONE)
    train(optimizer, model, ALONE, range(2))
    state = optimizer.pieces()
    for name, parameter in model.named_parameters():
        master = state[f"weight/{name}"]
        assert torch.equal(parameter, master.to(parameter.dtype)), name
        table = name.startswith(("transformer.wte", "value_embeds"))
        assert master.dtype == (torch.bfloat16 if table else torch.float32), name
        small = parameter.numel() < 1024 and not name.startswith("transformer.h.")
        assert parameter.dtype == (torch.float32 if small else torch.bfloat16), name


def test_stacks_are_larger_without_other_ranks_and_updates_the_same(monkeypatch):
    monkeypatch.setattr(sharded, "STACK_ELEMENTS", {"cpu": 1})
    states = []
    for alone, count in (({}, 20), ({"cpu": 2**27}, 4)):
        monkeypatch.setattr(sharded, "STACK_ELEMENTS_ALONE", alone)
        stacks = sharded.make_stacks(make_model(), RATES, torch.float32, ALONE)
        assert sum(stack.group is None for stack in stacks) == count  # of Muon's 20 matrices
        model = make_model()
        train(Optimizer(model, RATES, precision="fp32", world=ALONE), model, ALONE, range(2))
        states.append(model.state_dict())
    for name, weight in states[0].items():
        torch.testing.assert_close(states[1][name], weight, atol=1e-5, rtol=0)


def test_a_model_serves_one_optimizer_at_a_time():
    model = make_model("bf16")
    Optimizer(model, RATES, precision="bf16", world=ALONE)
    with pytest.raises(AssertionError, match="another optimizer"):
        Optimizer(model, RATES, precision="bf16", world=ALONE)


# Parameters whose gradients a backward pass adds to the optimizer's sums by itself.

TABLES = "transformer.wte.weight", "value_embeds.0.weight", "value_embeds.2.weight"


def loss_of(model, seed):
    tokens = torch.randint(60, (1, 17), generator=torch.Generator().manual_seed(seed))
    return model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum()


def test_tables_and_the_head_have_sums_and_matrices_in_blocks_none():
    model = make_model()
    optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
    modules = model.named_modules()
    summed = {f"{name}.weight" for name, m in modules if getattr(m, "gradient_sum", None)}
    assert summed == {*TABLES, "lm_head.weight"}
    del optimizer


def test_a_sum_belongs_to_one_model_and_one_optimizer():
    model = make_model()
    assert model.lm_head.gradient_sum is None
    optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
    assert copy.deepcopy(model).lm_head.gradient_sum is None
    table = model.transformer.wte
    total, holds = table.gradient_sum.take()
    assert total.shape == table.weight.shape
    assert not holds
    assert table.gradient_sum.take()[1]
    gone, own = weakref.ref(optimizer), table.gradient_sum
    other = Optimizer(model, RATES, precision="fp32", world=ALONE)
    newer = table.gradient_sum
    assert newer is not own
    del optimizer, total
    assert gone() is None
    assert table.gradient_sum is newer  # the first optimizer's end does not take the second's sum
    with pytest.raises(AssertionError, match="optimizer of a gradient is gone"):
        own.take()
    del other


def test_a_model_whose_optimizer_is_gone_has_gradients_and_both_are_freed_at_once():
    with adding_lookups():
        loss_of(make_model(), 1).backward()  # torch's first pass imports, and keeps frames
        model = make_model()
        optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
        optimizer.backward(loss_of(model, 1), last=True)
        table = model.transformer.wte
        gone = [weakref.ref(one) for one in (optimizer, table.gradient_sum)]
        del optimizer
        assert [one() for one in gone] == [None, None]
        assert table.gradient_sum is None
        loss_of(model, 1).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        gone = [weakref.ref(one) for one in (model, *model.parameters())]
        del model, table
        assert not any(one() is not None for one in gone)
