"""The division of a model's parameters into stacks, and of each stack among the ranks.

Muon's matrices of one shape are stacked and each is owned whole by one rank; AdamW's tables are
divided by rows. Every rank updates parameters of less than SMALL elements by itself.

The stacks are in the order in which a backward pass finishes them, from the last layer to the
first, so that the sum over ranks of one overlaps with computing the gradients of the next. The
matrices of one shape therefore form several stacks where a single one would be needlessly large.
A graph gives all its gradients at its end: with `compile=blocks` those of one block, with
`compile=true` those of the whole pass, so that only lm_head's sum overlaps it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nanochat_core.config import OptimizerConfig
from nanochat_core.optim.groups import AdamWGroup, adamw_groups, group_of, layer_of
from nanochat_core.optim.muon import second_moment_shape
from nanochat_core.optim.sharded_params import ShardedParams
from nanochat_core.runtime.hardware.distributed import World

SMALL = 1024  # elements; below this a collective costs more than the update on every rank
# Most elements of a stack that one rank owns: on a GPU enough to keep it busy and a collective at
# full speed; on a CPU so few that Muon's working memory, several times the stack, fits its cache.
STACK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# A GPU alone waits for no collective, so nothing is gained by dividing: a product of many matrices
# fills it better than one of a few, and a step has a tenth of the launches.
STACK_ELEMENTS_ALONE = {"cuda": 2**27}


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """A stack of parameters and the rule that updates it."""

    stack: ShardedParams
    group: AdamWGroup | None  # None means Muon
    lr: float


def make_units(
    model: nn.Module, config: OptimizerConfig, dtype: torch.dtype, world: World
) -> list[ParamGroup]:
    """Return all parameters of the model in stacks, in the order a backward pass finishes them."""
    groups = adamw_groups(config)
    muon: dict[str, nn.Parameter] = {}
    units: list[ParamGroup] = []
    for name, parameter in model.named_parameters():
        group = group_of(name, groups)
        if group is None:
            # Muon's masters are taken from the parameter, so it must not have been rounded yet.
            assert parameter.dtype == torch.float32, f"{name} is another optimizer's working weight"
            muon[name] = parameter
        else:
            stack = _table(name, parameter, dtype, world)
            units.append(ParamGroup(stack=stack, group=group, lr=group.lr))
    for matrices in _stacks(muon, world):
        stack = _matrices(matrices, config, dtype, world)
        units.append(ParamGroup(stack=stack, group=None, lr=config.muon_lr))
    return sorted(units, key=_finished, reverse=True)


def _stacks(muon: dict[str, nn.Parameter], world: World) -> Iterator[dict[str, nn.Parameter]]:
    """Yield matrices of one shape, last layer to first, in stacks of nearly equal size."""
    for shape in sorted({tuple(p.shape) for p in muon.values()}):
        named = [(name, p) for name, p in muon.items() if p.shape == shape]
        named.sort(key=lambda item: layer_of(item[0]), reverse=True)
        device = named[0][1].device.type
        most = STACK_ELEMENTS[device]
        if world.size == 1:
            most = STACK_ELEMENTS_ALONE.get(device, most)
        limit = max(1, most // math.prod(shape)) * world.size
        size = math.ceil(len(named) / math.ceil(len(named) / limit))
        # A multiple of the world size, so that only the last stack is padded with zero matrices.
        size = -(-size // world.size) * world.size
        for first in range(0, len(named), size):
            yield dict(named[first : first + size])


def _matrices(
    parameters: dict[str, nn.Parameter],
    config: OptimizerConfig,
    dtype: torch.dtype,
    world: World,
) -> ShardedParams:
    rows, cols = next(iter(parameters.values())).shape
    state = {"momentum": (rows, cols)}
    if config.muon == "polar_express":
        state["second_moment"] = second_moment_shape(rows, cols)
    return ShardedParams(parameters, by_row=False, state=state, dtype=dtype, world=world)


def _table(name: str, parameter: nn.Parameter, dtype: torch.dtype, world: World) -> ShardedParams:
    row, small = tuple(parameter.shape[1:]), parameter.numel() < SMALL
    # Small parameters keep their own dtype, so scalars such as resid_lambdas stay fp32.
    return ShardedParams(
        {name: parameter},
        by_row=True,
        state={"exp_avg": row, "exp_avg_sq": row},
        dtype=parameter.dtype if small else dtype,
        world=world,
        replicated=small,
    )


def _finished(unit: ParamGroup) -> tuple[float, int]:
    """Return the sort key of a unit: larger if backward finishes it sooner; ties by size."""
    return min(layer_of(part.name) for part in unit.stack.parts), unit.stack.num_elements
