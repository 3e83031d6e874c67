"""The optimizer of every training stage: Muon for the matrices in blocks, AdamW for the rest.

It owns the training state and divides it among the ranks (ZeRO-2, see stack.py): gradients are
summed to their owners, owners update, and every rank receives the working weights. One code path
serves one rank and many. Muon's matrices of one shape are divided whole, tables by rows; tensors of
less than SMALL elements are updated by every rank.

Precision. The masters of matrices are fp32; the model's own parameters are the working weights,
cast once per step. The embedding tables follow nanochat: in bf16 they are their own masters, and
their moments are bf16 too. They are most of a small model's parameters, each of their rows is met
by few tokens of a batch and moves by a large learning rate, and the recipe's constants were found
with them so. Gradients add up in fp32 over micro-steps and ranks.

Saved state, one tensor per key, whole whatever the world size was:

    step                          int64 scalar, steps taken; AdamW's bias correction needs it
    weight/{parameter}            the master
    momentum/{parameter}          Muon, like the parameter, fp32
    second_moment/{parameter}     Muon, (rows, 1), or (1, columns) when wider than tall, fp32
    exp_avg/{parameter}           AdamW, like the parameter and in its master's dtype
    exp_avg_sq/{parameter}        AdamW, likewise

A rank's piece of a table, rows a and following, has the key with `#a` appended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanochat_core.config import OptimizerConfig
from nanochat_core.optim.adamw import adamw_
from nanochat_core.optim.groups import ADAMW_GROUPS, AdamWGroup, adamw_group
from nanochat_core.optim.muon import muon_, second_moment_shape
from nanochat_core.optim.stack import Stack
from nanochat_core.runtime.device import compute_dtype
from nanochat_core.runtime.distributed import World

SMALL = 1024  # elements


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A stack, and the rule that updates it."""

    stack: Stack
    group: AdamWGroup | None  # None: Muon
    lr: float


class Optimizer:
    """Updates a model's parameters from their gradients, and owns the state of training."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, *, precision: str, world: World
    ) -> None:
        """Starts from the model's weights; the model must have its storage, and keeps it.

        From here on the model's parameters are working weights in the dtype of `precision`, which
        is also that of Muon's matrix products. Weights are set by `load`, no longer by the model.
        """
        self._dtype = compute_dtype(precision)
        self._num_steps = 0
        self._has_gradients = False
        self._world = world
        self._units = list(_make_units(model, config, self._dtype, world))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss` to the step's. `last`: this rank's last for this step."""
        loss.backward()
        self._take_gradients()

    @torch.no_grad()
    def step(self, *, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        """One update from the gradients of all ranks, which are then dropped.

        `lr_multiplier` scales every learning rate; `momentum` and `weight_decay` are Muon's.
        """
        self._num_steps += 1
        self._take_gradients()
        assert self._has_gradients or self._world.size > 1, "a step needs a gradient"
        self._has_gradients = False
        for unit in self._units:
            unit.stack.start_sum()
        for unit in self._units:
            stack, lr = unit.stack, unit.lr * lr_multiplier
            gradients = stack.summed_gradients()
            if unit.group is None:
                muon_(
                    stack.masters,
                    gradients,
                    stack.state["momentum"],
                    stack.state["second_moment"],
                    lr=lr,
                    mu=momentum,
                    weight_decay=weight_decay,
                    dtype=self._dtype,
                )
            else:
                adamw_(
                    [stack.masters],
                    [gradients],
                    [stack.state["exp_avg"]],
                    [stack.state["exp_avg_sq"]],
                    step=self._num_steps,
                    lr=lr,
                    group=unit.group,
                )
            stack.start_share()
        for unit in self._units:
            unit.stack.finish_share()

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients of the step so far, by parameter; those that have one."""
        return {name: g for unit in self._units for name, g in unit.stack.gradients()}

    def pieces(self) -> dict[str, Tensor]:
        """What this rank owns of the state. The tensors are the optimizer's own, on the device."""
        result: dict[str, Tensor] = {}
        if self._world.is_first:
            result["step"] = torch.tensor(self._num_steps)
        for unit in self._units:
            result.update(unit.stack.pieces())
        return result

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Take over a saved state, of any world size. Collective.

        `read` gives the whole tensor of a key on the CPU; each rank reads what it owns a part of.
        Raises ModelError when a shape is not this model's, and whatever `read` raises.
        """
        self._num_steps = int(read("step"))
        for unit in self._units:
            unit.stack.load(read)
            unit.stack.start_share()
            unit.stack.finish_share()

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor]:
        """The whole state on the host of the first rank; {} elsewhere. Collective."""
        result: dict[str, Tensor] = {}
        if self._world.is_first:
            result["step"] = torch.tensor(self._num_steps)
        for unit in self._units:
            result.update(unit.stack.gather())
        return result

    def _take_gradients(self) -> None:
        for unit in self._units:
            for part in unit.stack.parts:
                if part.parameter.grad is not None:
                    unit.stack.take_gradient(part)
                    self._has_gradients = True


def _make_units(
    model: nn.Module, config: OptimizerConfig, dtype: torch.dtype, world: World
) -> Iterator[_Unit]:
    named = dict(model.named_parameters())
    muon = {name: p for name, p in named.items() if adamw_group(name) is None}
    for rows, cols in sorted({tuple(p.shape) for p in muon.values()}):
        stack = Stack(
            {name: p for name, p in muon.items() if p.shape == (rows, cols)},
            by_row=False,
            state={"momentum": (rows, cols), "second_moment": second_moment_shape(rows, cols)},
            dtype=dtype,
            world=world,
        )
        yield _Unit(stack=stack, group=None, lr=config.muon_lr)
    for group in ADAMW_GROUPS:
        for name, parameter in named.items():
            if adamw_group(name) is not group:
                continue
            row, small = tuple(parameter.shape[1:]), parameter.numel() < SMALL
            stack = Stack(
                {name: parameter},
                by_row=True,
                state={"exp_avg": row, "exp_avg_sq": row},
                dtype=parameter.dtype if small else dtype,
                world=world,
                replicated=small,
            )
            yield _Unit(stack=stack, group=group, lr=getattr(config, group.lr))
