"""A parameter's gradient that a backward pass adds to the optimizer's fp32 sum by itself.

Autograd otherwise hands the gradient over in the parameter's dtype, and the optimizer adds it: the
gradient is rounded, and written and read once more. For a table it is dense besides, although a
batch reads few of the table's rows.

An autograd function that adds takes `proxy` as an input, and the parameter detached. Its backward
pass adds the gradient to `take()`, and returns any scalar as the gradient of `proxy`. When the
backward pass has nothing more to add, autograd calls the optimizer's hook, as for a parameter.

A model without an optimizer, or whose optimizer is gone, has no sums: its gradients are autograd's.
"""

import itertools
import weakref
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

_NUMBERS = itertools.count()
_SUMS: "weakref.WeakValueDictionary[int, GradientSum]" = weakref.WeakValueDictionary()


class GradientSum:
    """The sum of a parameter's gradients over the micro-steps of a step; the optimizer owns it.

    `number`: see `take_by_number`. `handle`: the same as an int64 scalar on the CPU, an input of a
    compiled graph, where each int would be a graph of its own.
    """

    def __init__(
        self,
        device: torch.device,
        take: Callable[[], tuple[Tensor, bool]],
        added: Callable[[Tensor], None],
    ) -> None:
        """`added` is called when a backward pass has added all that it has to add."""
        self.number = next(_NUMBERS)
        self.handle = torch.tensor(self.number, device="cpu")
        self.proxy = torch.zeros((), device=device, requires_grad=True)
        self._take = take
        # Of `added` alone: Python collects a cycle through a tensor's hooks late, or never.
        self.proxy.register_post_accumulate_grad_hook(partial(_after, added))
        _SUMS[self.number] = self

    def attach(self, module: "Weighted", owner: object) -> None:
        """Have the module add to this sum for as long as `owner` lives."""
        module.gradient_sum = self
        weakref.finalize(owner, _detach, weakref.ref(module), self.number).atexit = False

    def take(self) -> tuple[Tensor, bool]:
        """Return the sum, fp32 and shaped like the parameter, and whether it holds gradients.

        The caller must add to it, or overwrite all of it where it holds none of this step.
        """
        return self._take()

    def __deepcopy__(self, memo: object) -> None:
        """Return None: the optimizer of a model is not that of its copy."""


class Weighted(nn.Module):
    """A module with one matrix. An optimizer sets `gradient_sum` where the module adds to it."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self.gradient_sum: GradientSum | None = None


def _after(added: Callable[[Tensor], None], proxy: Tensor) -> None:
    proxy.grad = None
    added(proxy)


def _detach(module: "weakref.ref[Weighted]", number: int) -> None:
    found = module()
    # Another optimizer may have attached its own sum since.
    attached = None if found is None else found.gradient_sum
    if found is not None and attached is not None and attached.number == number:
        found.gradient_sum = None


@lru_cache
def unit_gradient(device: torch.device) -> Tensor:
    """Return the 1 with which the optimizer begins a backward pass.

    An autograd function that gets this very tensor need not multiply by it. Do not write to it.
    """
    return torch.ones((), device=device)


def take_by_number(number: int) -> tuple[Tensor, bool]:
    """Return what `take` of a GradientSum does: for operators, whose arguments are no objects."""
    return _SUMS[number].take()
