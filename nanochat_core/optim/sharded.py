"""The optimizer of every training stage: Muon for the matrices in blocks, AdamW for the rest.

It owns the training state and divides it among the ranks (ZeRO-2; stack.py says how): gradients are
summed to their owners, owners update, and every rank receives the working weights. One code path
serves one rank and many, and on a GPU no rank reads a tensor on the host.

Precision. The masters of matrices are fp32; the model's own parameters are the working weights,
cast once per step. The embedding tables follow nanochat: in bf16 they are their own masters, and
their moments are bf16 too. They are most of a small model's parameters, each of their rows is met
by few tokens of a batch and moves by a large learning rate, and the recipe's constants were found
with them so. Gradients add up in fp32 over micro-steps and ranks.

Saved state, one tensor per key, whole whatever the world size was:

    step                          int64 scalar, steps taken; AdamW's bias correction needs it
    weight/{parameter}            the master
    momentum/{parameter}          Muon, like the parameter, fp32
    second_moment/{parameter}     Muon, (rows, 1), or (1, columns) when wider than tall, fp32;
                                  not with Newton-Schulz
    exp_avg/{parameter}           AdamW, like the parameter and in its master's dtype
    exp_avg_sq/{parameter}        AdamW, likewise

A rank's piece of a table, rows a and following, has the key with `#a` appended.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanochat_core.config import OptimizerConfig
from nanochat_core.optim.adamw import adamw_
from nanochat_core.optim.january import clip_factor, newton_schulz_muon_, squared_norm
from nanochat_core.optim.muon import muon_
from nanochat_core.optim.partition import ParamGroup, make_units
from nanochat_core.optim.sharded_params import ParamSlice
from nanochat_core.runtime.hardware.device import compute_dtype
from nanochat_core.runtime.hardware.distributed import World


class Optimizer:
    """Updates a model's parameters from their gradients, and owns the state of training.

    A step is: `backward` for each micro-batch, `start_reduce_scatter`, `step`. All ranks must do
    the same, but for the number of micro-batches, which may be none. Between `backward` and `step`
    nothing else may be reduced over the GPUs before `start_reduce_scatter`.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, *, precision: str, world: World
    ) -> None:
        """Starts from the model's weights; the model must have its storage, and keeps it.

        From here on the model's parameters are working weights in the dtype of `precision`, which
        is also that of Muon's matrix products. Weights are set by `load`, no longer by the model.
        Their version counters (`Tensor._version`) move whenever they change.
        """
        self._dtype = compute_dtype(precision)
        self._newton_schulz = config.muon == "newton_schulz"
        self._grad_clip = config.grad_clip
        self._world = world
        self._num_steps = 0
        self._units = make_units(model, config, self._dtype, world)
        self._started = 0  # units whose gradients are being summed
        self._has_gradients = False
        self._collecting = False  # whether a backward pass of ours is running
        self._missing: list[int] | None = None  # in the last one, by unit: gradients to come
        for index, unit in enumerate(self._units):
            for part in unit.stack.parts:
                part.parameter.register_post_accumulate_grad_hook(
                    _collector(weakref.ref(self), index, part)
                )

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss` to the step's. `last`: this rank's last for this step.

        Never waits for another rank.
        """
        self._collecting = True
        self._missing = [len(unit.stack.parts) for unit in self._units] if last else None
        try:
            loss.backward()
        finally:
            self._collecting, self._missing = False, None

    def start_reduce_scatter(self) -> None:
        """Begin to sum what is not being summed yet, once this rank has its last gradient.

        Never waits for another rank. A parameter without a gradient on this rank counts as zero.
        """
        for unit in self._units:
            for part in unit.stack.parts:
                if part.parameter.grad is not None:  # not by `backward`
                    self._take(unit, part)
        for unit in self._units[self._started :]:
            unit.stack.start_sum()
        self._started = len(self._units)

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that failed on some rank. Every rank must do so."""
        # Other ranks may have begun sums that this one has not: they must meet.
        self.start_reduce_scatter()
        for unit in self._units:
            unit.stack.drop_gradients()
        self._started, self._has_gradients = 0, False

    @torch.no_grad()
    def step(self, *, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        """One update from the gradients of all ranks, which are then dropped.

        `lr_multiplier` scales every learning rate; `momentum` and `weight_decay` are Muon's.
        """
        self.start_reduce_scatter()
        assert self._has_gradients or self._world.size > 1, "a step needs a gradient"
        self._num_steps += 1
        clip = None if self._grad_clip is None else self._clip_factor(self._grad_clip)
        for unit in self._units:
            gradients = unit.stack.summed_gradients()
            if clip is not None:
                gradients = gradients.mul_(clip)
            self._update(unit, gradients, lr_multiplier, momentum, weight_decay)
            del gradients
            unit.stack.drop_gradients()
            unit.stack.start_share()
        for unit in self._units:
            unit.stack.finish_share()
        self._started, self._has_gradients = 0, False

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients of the step before `start_reduce_scatter`, by parameter, if it has
        one."""
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

    def collect(self, index: int, part: ParamSlice) -> None:
        """Take a parameter's gradient in a backward pass of ours; begin sums that are complete."""
        if not self._collecting:
            return
        self._take(self._units[index], part)
        if self._missing is None:
            return
        self._missing[index] -= 1
        # Always in the units' order: a rank that lacks a gradient must not sum another unit first.
        while self._started < len(self._units) and not self._missing[self._started]:
            self._units[self._started].stack.start_sum()
            self._started += 1

    def _take(self, unit: ParamGroup, part: ParamSlice) -> None:
        unit.stack.take_gradient(part)
        self._has_gradients = True

    def _clip_factor(self, grad_clip: float) -> Tensor:
        """What brings the norm of the whole gradient down to `grad_clip`. Collective."""
        counted = [u.stack for u in self._units if self._world.is_first or not u.stack.replicated]
        square = squared_norm([stack.summed_gradients() for stack in counted])
        return clip_factor(self._world.sum(square).sqrt(), grad_clip)

    def _update(
        self,
        unit: ParamGroup,
        gradients: Tensor,
        lr_multiplier: float,
        mu: float,
        weight_decay: float,
    ) -> None:
        stack, lr = unit.stack, unit.lr * lr_multiplier
        if unit.group is not None:
            adamw_(
                [stack.masters],
                [gradients],
                [stack.state["exp_avg"]],
                [stack.state["exp_avg_sq"]],
                step=self._num_steps,
                lr=lr,
                group=unit.group,
            )
        elif self._newton_schulz:
            newton_schulz_muon_(
                stack.masters, gradients, stack.state["momentum"], lr=lr, mu=mu, dtype=self._dtype
            )
        else:
            muon_(
                stack.masters,
                gradients,
                stack.state["momentum"],
                stack.state["second_moment"],
                lr=lr,
                mu=mu,
                weight_decay=weight_decay,
                dtype=self._dtype,
            )


def _collector(
    optimizer: "weakref.ref[Optimizer]", index: int, part: ParamSlice
) -> Callable[[Tensor], None]:
    """The hook of a parameter, which lives as long as that, not as the optimizer."""

    def collect(parameter: Tensor) -> None:
        found = optimizer()
        if found is not None:
            found.collect(index, part)

    return collect
