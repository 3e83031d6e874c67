"""The optimizer of every training stage: Muon for the matrices in blocks, AdamW for the rest.

It owns the training state and divides it among the ranks (ZeRO-2, see sharded_params.py): gradients
are reduce-scattered to their owners, owners update, and the working weights are all-gathered. One
code path serves one rank and many, and a step never waits for the GPU.

Precision: the masters of matrices are fp32; the model's own parameters are the working weights,
cast once per step. The embedding tables follow nanochat: in bf16 they are their own masters, and
their moments are bf16 too. They are most of a small model's parameters, each row occurs in few
tokens of a batch and has a large learning rate, and the recipe's constants were tuned for this.
Gradients accumulate in fp32 over micro-steps and ranks.

Saved state, one tensor per key, whole and independent of the world size:

    step                          int64 scalar, steps taken; AdamW's bias correction needs it
    weight/{parameter}            the master
    momentum/{parameter}          Muon, like the parameter, fp32
    second_moment/{parameter}     Muon, (rows, 1), or (1, columns) when wider than tall, fp32;
                                  not with Newton-Schulz
    exp_avg/{parameter}           AdamW, like the parameter and in its master's dtype
    exp_avg_sq/{parameter}        AdamW, likewise

A rank's slice of a table, from row a on, has the key with `#a` appended.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanochat_core.config import OptimizerConfig
from nanochat_core.model.gradient_sum import GradientSum, Weighted, unit_gradient
from nanochat_core.optim.adamw import adamw_
from nanochat_core.optim.january import clip_factor, newton_schulz_muon_, squared_norm
from nanochat_core.optim.muon import muon_
from nanochat_core.optim.partition import ParamGroup, make_units
from nanochat_core.optim.sharded_params import ParamSlice, ShardedParams
from nanochat_core.runtime.hardware.device import compute_dtype
from nanochat_core.runtime.hardware.distributed import World


class Optimizer:
    """The optimizer of a model; it owns the training state.

    A step is: `backward` for each micro-batch, `start_reduce_scatter`, `step`. All ranks must make
    the same calls, except that the number of micro-batches may differ and may be 0. Between the
    last `backward` and `start_reduce_scatter` no other collective may run on the GPUs.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, *, precision: str, world: World
    ) -> None:
        """Start from the model's weights; the model must be materialised (not on "meta").

        Afterwards the model's parameters are working weights in the dtype of `precision`, on a GPU
        also that of Muon's matrix products. Set weights by `load`, no longer through the model.
        Their version counters (`Tensor._version`) advance whenever they change.
        """
        dtype = compute_dtype(precision)
        # On a CPU batched bf16 products are a plain loop, 30 times as slow as fp32's.
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._dtype = torch.float32 if on_cpu else dtype
        self._newton_schulz = config.muon == "newton_schulz"
        self._grad_clip = config.grad_clip
        self._world = world
        self._num_steps = 0
        self._units = make_units(model, config, dtype, world)
        self._started = 0  # units whose reduce-scatter has started
        self._has_gradients = False
        self._collecting = False  # True while a backward pass of `backward` runs
        # In the last pass: the parameters whose gradients are to come, by unit.
        self._missing: list[set[str]] | None = None
        modules = {id(m.weight): m for m in model.modules() if isinstance(m, Weighted)}
        for index, unit in enumerate(self._units):
            for part in unit.stack.parts:
                hook = _collector(weakref.ref(self), index, part)
                part.parameter.register_post_accumulate_grad_hook(hook)
                module = modules.get(id(part.parameter))
                # Matrices in blocks are Muon's, and add nothing by themselves.
                if module is not None and unit.group is not None and not unit.stack.replicated:
                    take = _taker(weakref.ref(unit.stack), part)
                    module.gradient_sum = GradientSum(part.parameter.device, take, hook)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss` to the step's. `last`: this rank's last for this step.

        Does not wait for other ranks.
        """
        self._collecting = True
        names = [{part.name for part in unit.stack.parts} for unit in self._units]
        self._missing = names if last else None
        try:
            loss.backward(unit_gradient(loss.device))
        finally:
            self._collecting, self._missing = False, None

    def start_reduce_scatter(self) -> None:
        """Start the reduce-scatter of all units that have none yet, after the last `backward`.

        Does not wait for other ranks. A parameter without a gradient on this rank counts as zero.
        """
        for unit in self._units:
            for part in unit.stack.parts:
                # Set by a caller's own backward pass: `collect` takes those of `backward`.
                if part.parameter.grad is not None:
                    self._take(unit, part)
        for unit in self._units[self._started :]:
            unit.stack.start_sum()
        self._started = len(self._units)

    @torch.no_grad()
    def step(self, *, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        """Update the weights from the gradients of all ranks, then discard the gradients.

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
            # Freed before the next unit's: otherwise two units' gradients would be held at once.
            del gradients
            unit.stack.drop_gradients()
            unit.stack.start_share()
        # Waited for only here: a unit's all-gather overlaps with the updates of those after it.
        for unit in self._units:
            unit.stack.finish_share()
        self._started, self._has_gradients = 0, False

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradients before `start_reduce_scatter`, by parameter that has one."""
        return {name: g for unit in self._units for name, g in unit.stack.gradients()}

    def pieces(self) -> dict[str, Tensor]:
        """Return the state that this rank owns: the optimizer's own tensors, on the device."""
        result: dict[str, Tensor] = {}
        if self._world.is_first:
            result["step"] = torch.tensor(self._num_steps)
        for unit in self._units:
            result.update(unit.stack.pieces())
        return result

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Load a saved state, of any world size. Collective.

        `read` returns the whole tensor of a key on the CPU; each rank reads the keys of which it
        owns a part. Raises ModelError if a shape is not this model's, and whatever `read` raises.
        """
        self._num_steps = int(read("step"))
        for unit in self._units:
            unit.stack.load(read)
            unit.stack.start_share()
            unit.stack.finish_share()

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor]:
        """Return the whole state on the host of the first rank; {} elsewhere. Collective."""
        result: dict[str, Tensor] = {}
        if self._world.is_first:
            result["step"] = torch.tensor(self._num_steps)
        for unit in self._units:
            result.update(unit.stack.gather())
        return result

    def collect(self, index: int, part: ParamSlice) -> None:
        """Take a parameter's gradient during `backward`; start every reduction that is complete.

        The backward pass may have added it to the sum itself: see model/gradient_sum.py.
        """
        if part.parameter.grad is None:
            self._has_gradients = True
        elif self._collecting:
            self._take(self._units[index], part)
        if self._missing is None:
            return
        self._missing[index].discard(part.name)
        # Always in the units' order: collectives match by order, and ranks may lack gradients.
        while self._started < len(self._units) and not self._missing[self._started]:
            self._units[self._started].stack.start_sum()
            self._started += 1

    def _take(self, unit: ParamGroup, part: ParamSlice) -> None:
        unit.stack.take_gradient(part)
        self._has_gradients = True

    def _clip_factor(self, grad_clip: float) -> Tensor:
        """Return the factor that limits the whole gradient's norm to `grad_clip`. Collective."""
        # Replicated gradients are the same on all ranks: only the first counts them.
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
    """Return the gradient hook of a parameter."""
    # A weak reference: the parameter owns the hook, and may outlive the optimizer.

    def collect(parameter: Tensor) -> None:
        found = optimizer()
        if found is not None:
            found.collect(index, part)

    return collect


def _taker(
    stack: "weakref.ref[ShardedParams]", part: ParamSlice
) -> Callable[[], tuple[Tensor, bool]]:
    """Return the function that takes a parameter's sum from its stack."""

    def take() -> tuple[Tensor, bool]:
        found = stack()
        assert found is not None, f"{part.name}: the optimizer of its gradient is gone"
        return found.take_sum(part)

    return take
