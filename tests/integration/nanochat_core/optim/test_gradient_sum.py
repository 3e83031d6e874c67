"""Which parameters add their gradients to the optimizer's sums by themselves, and for how long."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch

from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from tests.support.nanochat_core.optim.ranks import (
    CLIPPED,
    RATES,
    adding_lookups,
    make_model,
    train,
)

pytestmark = pytest.mark.torch

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
