"""A backward pass that adds a parameter's gradient to the optimizer's sum by itself."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch

from nanochat_core.optim.sharded import Optimizer
from nanochat_core.optim.sharded_params import ShardedParams
from nanochat_core.runtime.hardware.distributed import ALONE, World
from tests.support.nanochat_core.optim.ranks import (
    CLIPPED,
    RATES,
    adding_lookups,
    gradients_of,
    make_model,
    train,
)

pytestmark = pytest.mark.torch

TABLES = "transformer.wte.weight", "value_embeds.0.weight", "value_embeds.2.weight"


def loss_of(model, seed):
    tokens = torch.randint(60, (1, 17), generator=torch.Generator().manual_seed(seed))
    return model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum()


def summed(precision, seeds):
    """The optimizer, and its gradients after a micro-step for each seed."""
    model = make_model(precision)
    optimizer = Optimizer(model, RATES, precision=precision, world=ALONE)
    for seed in seeds:
        optimizer.backward(loss_of(model, seed), last=seed == seeds[-1])
        assert all(parameter.grad is None for parameter in model.parameters())
    return optimizer, {name: g.clone() for name, g in gradients_of(optimizer).items()}


def test_tables_and_the_head_have_sums_and_matrices_in_blocks_none():
    model = make_model()
    optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
    modules = model.named_modules()
    summed = {f"{name}.weight" for name, m in modules if getattr(m, "gradient_sum", None)}
    assert summed == {*TABLES, "lm_head.weight"}
    del optimizer


@pytest.mark.parametrize("rates", [RATES, CLIPPED], ids=["plain", "clipped"])
def test_training_is_that_of_autograds_gradients(rates):
    states = []
    for adding in (False, True):
        model = make_model()
        optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
        with adding_lookups() if adding else nullcontext():
            train(optimizer, model, ALONE, range(3))
        states.append(optimizer.gather())
    assert states[0].keys() == states[1].keys()
    for key in states[0]:
        torch.testing.assert_close(states[1][key], states[0][key], rtol=1e-4, atol=1e-5, msg=key)


def test_the_first_addition_of_a_step_starts_from_zero():
    with adding_lookups():
        _, expected = summed("fp32", (3,))
        model = make_model()
        optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
        for seed in (1, 2):
            optimizer.backward(loss_of(model, seed), last=seed == 2)
        assert all(gradients_of(optimizer)[name].any() for name in TABLES)
        optimizer.step(lr_multiplier=0.0, momentum=0.9, weight_decay=0.0)
        assert not gradients_of(optimizer)
        optimizer.backward(loss_of(model, 3), last=True)
        found = gradients_of(optimizer)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_backward_pass_of_the_callers_own_counts():
    with adding_lookups():
        model = make_model()
        optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
        loss_of(model, 1).backward()
        optimizer.start_reduce_scatter()
        found = gradients_of(optimizer)
        _, expected = summed("fp32", (1,))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_parameter_used_twice_in_a_pass_is_reduced_after_both(monkeypatch):
    """Its hook runs once, after all of the pass's additions."""
    calls = []
    start, take = ShardedParams.start_reduce_scatter, ShardedParams.take_sum
    monkeypatch.setattr(
        ShardedParams,
        "start_reduce_scatter",
        lambda s: (calls.append(f"sum {s.parts[0].name}"), start(s)),
    )
    monkeypatch.setattr(
        ShardedParams, "take_sum", lambda s, p: (calls.append(f"take {p.name}"), take(s, p))[1]
    )
    with adding_lookups():
        model = make_model()
        optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
        optimizer.backward(loss_of(model, 1) + loss_of(model, 2), last=True)
    for name in TABLES:
        assert [call for call in calls if call.endswith(name)] == [
            f"take {name}",
            f"take {name}",
            f"sum {name}",
        ]


def test_an_addition_after_the_reduction_has_started_is_refused():
    class Started(World):
        def start_sum(self, tensor):
            return torch.futures.Future()

        start_sum_to_owners = start_sum

        def sum(self, tensor):
            return tensor

    world = Started(rank=0, local_rank=0, size=2)
    model = make_model()
    optimizer = Optimizer(model, RATES, precision="fp32", world=world)
    assert model.transformer.wte.gradient_sum is not None
    optimizer.start_reduce_scatter()
    with pytest.raises(AssertionError, match="after its reduction has started"):
        model.transformer.wte.gradient_sum.take()


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
