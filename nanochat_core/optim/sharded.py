"""The optimizer of every training stage: Muon for the matrices in blocks, AdamW for the rest.

It owns the training state and divides it among the ranks (ZeRO-2). Parameters lie in *stacks*:
Muon's matrices of one shape in one, a table of AdamW's, row by row, in one of its own. A stack's
items (matrices, rows) have one owner each, but each rank owns all of a small parameter (SMALL),
whose gradient is summed for all. A step of two ranks on a stack of four items:

                      rank 0                rank 1
    backward          g0 g1 g2 g3           g0 g1 g2 g3       gradients of a rank's own tokens
    reduce-scatter    G0 G1                 G2 G3             summed over the ranks, at the owner
    own update        w0 w1                 w2 w3             from masters and state only it has
    all-gather        w0 w1 w2 w3           w0 w1 w2 w3       the working weights, for all

While a stack's gradients are summed, the backward pass computes those of the stacks after it; while
its weights are gathered, those after it are updated. One code path serves one rank and many, and a
step never waits for the GPU. A *part* is one parameter's items in a stack, a *piece* what a rank
owns of a part's state.

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

A piece of a table, from row a on, has the key with `#a` appended.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from nanochat_core.config import OptimizerConfig
from nanochat_core.model.gradient_sum import GradientSum, Weighted, unit_gradient
from nanochat_core.model.matrices import gradient as matrix_gradient
from nanochat_core.optim.adamw import adamw_
from nanochat_core.optim.groups import adamw_groups, group_of, layer_of
from nanochat_core.optim.january import clip_factor, newton_schulz_muon_, squared_norm
from nanochat_core.optim.muon import muon_, second_moment_shape
from nanochat_core.optim.sharded_params import Part, ShardedParams
from nanochat_core.runtime.hardware.device import compute_dtype
from nanochat_core.runtime.hardware.distributed import World

SMALL = 1024  # elements; below this a collective costs more than the update on every rank
# Most elements of a stack that one rank owns: on a GPU enough to keep it busy and a collective at
# full speed; on a CPU so few that Muon's working memory, several times the stack, fits its cache.
STACK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# A GPU alone waits for no collective, so nothing is gained by dividing: a product of many matrices
# fills it better than one of a few, and a step has a tenth of the launches.
STACK_ELEMENTS_ALONE = {"cuda": 2**27}


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
        device = next(model.parameters()).device
        on_cpu = device.type == "cpu"
        self._dtype = torch.float32 if on_cpu else dtype
        self._newton_schulz = config.muon == "newton_schulz"
        self._grad_clip = config.grad_clip
        self._world = world
        self._num_steps = 0
        self._stacks = make_stacks(model, config, dtype, world)
        self._started = 0  # stacks whose reduce-scatter has started
        self._has_gradients = False
        self._loss = torch.zeros((), device=device)  # of the step so far, on this rank
        self._collecting = False  # True while a backward pass of `backward` runs
        # In the last pass: the parameters whose gradients are to come, by stack.
        self._missing: list[set[str]] | None = None
        modules = {id(m.weight): m for m in model.modules() if isinstance(m, Weighted)}
        for index, stack in enumerate(self._stacks):
            for part in stack.parts:
                hook = partial(_collect, weakref.ref(self), index, weakref.ref(part))
                part.parameter.register_post_accumulate_grad_hook(hook)
                module = modules.get(id(part.parameter))
                # Matrices in blocks, which are Muon's, add by themselves only where a kernel does.
                adds = stack.group is not None or matrix_gradient.may_add(part.parameter)
                if module is not None and adds and not stack.replicated:
                    take = partial(_take_sum, weakref.ref(stack), weakref.ref(part))
                    GradientSum(part.parameter.device, take, hook).attach(module, stack)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss` to the step's. `last`: this rank's last for this step.

        Does not wait for other ranks.
        """
        self._loss += loss.detach()
        self._collecting = True
        names = [{part.name for part in stack.parts} for stack in self._stacks]
        self._missing = names if last else None
        try:
            loss.backward(unit_gradient(loss.device))
        finally:
            self._collecting, self._missing = False, None

    def start_reduce_scatter(self) -> Tensor:
        """Start to sum the step's gradients over the ranks; return its loss, summed over them.

        Call it once, after the last `backward`; a parameter without a gradient on this rank counts
        as zero. The loss is a scalar on the device, which is not waited for. Collective.
        """
        self._start_rest()
        return self._world.sum(self._loss)

    def _start_rest(self) -> None:
        """Start the reduce-scatter of all stacks that have none yet."""
        for stack in self._stacks:
            for part in stack.parts:
                # Set by a caller's own backward pass: `collect` takes those of `backward`.
                if part.parameter.grad is not None:
                    self._take(stack, part)
        for stack in self._stacks[self._started :]:
            stack.start_reduce_scatter()
        self._started = len(self._stacks)

    @torch.no_grad()
    def step(self, *, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        """Update the weights from the gradients of all ranks, then discard the gradients.

        `lr_multiplier` scales every learning rate; `momentum` and `weight_decay` are Muon's.
        """
        self._start_rest()
        assert self._has_gradients or self._world.size > 1, "a step needs a gradient"
        self._num_steps += 1
        clip = None if self._grad_clip is None else self._clip_factor(self._grad_clip)
        for stack in self._stacks:
            gradients = stack.summed_gradients()
            if clip is not None:
                gradients = gradients.mul_(clip)
            self._update(stack, gradients, lr_multiplier, momentum, weight_decay)
            # Freed before the next stack's: otherwise two stacks' gradients would be held at once.
            del gradients
            stack.drop_gradients()
            stack.start_all_gather()
        # Waited for only here: a stack's all-gather overlaps with the updates of those after it.
        for stack in self._stacks:
            stack.finish_all_gather()
        self._started, self._has_gradients = 0, False
        self._loss = torch.zeros_like(self._loss)

    def pieces(self) -> dict[str, Tensor]:
        """Return the state that this rank owns: the optimizer's own tensors, on the device."""
        result: dict[str, Tensor] = {}
        if self._world.is_first:
            result["step"] = torch.tensor(self._num_steps)
        for stack in self._stacks:
            result.update(stack.pieces())
        return result

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        """Load a saved state, of any world size. Collective.

        `read` returns the whole tensor of a key on the CPU; each rank reads the keys of which it
        owns a part. Raises ModelError if a shape is not this model's, and whatever `read` raises.
        """
        self._num_steps = int(read("step"))
        for stack in self._stacks:
            stack.load(read)
            stack.start_all_gather()
            stack.finish_all_gather()

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor]:
        """Return the whole state on the host of the first rank; {} elsewhere. Collective."""
        result: dict[str, Tensor] = {}
        if self._world.is_first:
            result["step"] = torch.tensor(self._num_steps)
        for stack in self._stacks:
            result.update(stack.gather())
        return result

    def collect(self, index: int, part: Part) -> None:
        """Take a parameter's gradient during `backward`; start every reduction that is complete.

        The backward pass may have added it to the sum itself: see model/gradient_sum.py.
        """
        if part.parameter.grad is None:
            self._has_gradients = True
        elif self._collecting:
            self._take(self._stacks[index], part)
        if self._missing is None:
            return
        self._missing[index].discard(part.name)
        # Always in the stacks' order: collectives match by order, and ranks may lack gradients.
        while self._started < len(self._stacks) and not self._missing[self._started]:
            self._stacks[self._started].start_reduce_scatter()
            self._started += 1

    def _take(self, stack: ShardedParams, part: Part) -> None:
        stack.take_gradient(part)
        self._has_gradients = True

    def _clip_factor(self, grad_clip: float) -> Tensor:
        """Return the factor that limits the whole gradient's norm to `grad_clip`. Collective."""
        # Replicated gradients are the same on all ranks: only the first counts them.
        counted = [s for s in self._stacks if self._world.is_first or not s.replicated]
        square = squared_norm([stack.summed_gradients() for stack in counted])
        return clip_factor(self._world.sum(square).sqrt(), grad_clip)

    def _update(
        self,
        stack: ShardedParams,
        gradients: Tensor,
        lr_multiplier: float,
        mu: float,
        weight_decay: float,
    ) -> None:
        lr = stack.lr * lr_multiplier
        if stack.group is not None:
            adamw_(
                [stack.masters],
                [gradients],
                [stack.state["exp_avg"]],
                [stack.state["exp_avg_sq"]],
                step=self._num_steps,
                lr=lr,
                group=stack.group,
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


# Weak references: a parameter owns its hook, and may outlive the optimizer. Python never collects a
# parameter that its hook owns.


def _collect(
    optimizer: "weakref.ref[Optimizer]", index: int, of: "weakref.ref[Part]", _: Tensor
) -> None:
    """Call `collect` of an optimizer that still exists: the gradient hook of a parameter."""
    found, part = optimizer(), of()
    if found is not None and part is not None:
        found.collect(index, part)


def _take_sum(stack: "weakref.ref[ShardedParams]", of: "weakref.ref[Part]") -> tuple[Tensor, bool]:
    """Return what `take_sum` does, of a stack that must still exist."""
    found, part = stack(), of()
    assert found is not None, "the optimizer of a gradient is gone"
    assert part is not None
    return found.take_sum(part)


def make_stacks(
    model: nn.Module, config: OptimizerConfig, dtype: torch.dtype, world: World
) -> list[ShardedParams]:
    """Return all parameters of the model in stacks, in the order a backward pass finishes them.

    From the last layer to the first, so that one's sum over ranks overlaps computing the gradients
    of the next. A graph gives all its gradients at its end: with `compile=blocks` those of a block,
    with `compile=true` those of the whole pass, so that only lm_head's sum overlaps it.
    """
    groups = adamw_groups(config)
    muon: dict[str, nn.Parameter] = {}
    stacks: list[ShardedParams] = []
    for name, parameter in model.named_parameters():
        group = group_of(name, groups)
        if group is None:
            # Muon's masters are taken from the parameter, so it must not have been rounded yet.
            assert parameter.dtype == torch.float32, f"{name} is another optimizer's working weight"
            muon[name] = parameter
        else:
            row, small = tuple(parameter.shape[1:]), parameter.numel() < SMALL
            stack = ShardedParams(
                {name: parameter},
                group=group,
                lr=group.lr,
                state={"exp_avg": row, "exp_avg_sq": row},
                # Small parameters keep their own dtype, so scalars such as resid_lambdas stay fp32.
                dtype=parameter.dtype if small else dtype,
                world=world,
                replicated=small,
            )
            stacks.append(stack)
    for matrices in _split(muon, world):
        rows, cols = next(iter(matrices.values())).shape
        state = {"momentum": (rows, cols)}
        if config.muon == "polar_express":
            state["second_moment"] = second_moment_shape(rows, cols)
        lr = config.muon_lr
        stacks.append(
            ShardedParams(matrices, group=None, lr=lr, state=state, dtype=dtype, world=world)
        )
    return sorted(stacks, key=_finished, reverse=True)


def _split(muon: dict[str, nn.Parameter], world: World) -> Iterator[dict[str, nn.Parameter]]:
    """Yield matrices of one shape, last layer to first, in stacks of nearly equal size.

    Several where a single one would be needlessly large.
    """
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


def _finished(stack: ShardedParams) -> tuple[float, int]:
    """Return the sort key of a stack: larger if backward finishes it sooner; ties by size."""
    return min(layer_of(part.name) for part in stack.parts), stack.num_elements
