"""A lookup in a table whose backward pass adds to the optimizer's sum, see ../gradient_sum.py.

autograd's own gradient of a table is dense and of the table's dtype; torch sums it by atomic
additions, whose order varies. Shapes: N tokens, V rows, C channels.
"""

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model.gradient_sum import GradientSum, take_by_number

Ordered: TypeAlias = tuple[Tensor, Tensor, Tensor]  # see `sort`

DEVICES = {"cuda"}  # of tables whose gradient is added; a CPU gains 2 ms of 2 s


def lookup(
    tokens: Tensor, table: Tensor, into: GradientSum, ordered: Ordered | None = None
) -> Tensor:
    """Return the rows (..., C) of the table (V, C) at tokens int64 (...).

    `ordered`: what `sort` returns of them, so that tables that share tokens share one sort.
    """
    order = ordered or (None, None, None)
    return _Lookup.apply(tokens, table.detach(), into.proxy, into.number, *order)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        table: Tensor,
        proxy: Tensor,
        number: int,
        *ordered: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(tokens, *ordered)
        ctx.num_rows, ctx.number = len(table), number
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *ordered = ctx.saved_tensors
        # torch's compiler finds the same sort elsewhere in a graph, and sorts once.
        ordered = sort(tokens, ctx.num_rows) if ordered[0] is None else ordered
        added = add_lookup_gradient(grad_outputs[0], *ordered, ctx.number)
        return None, None, added, None, None, None, None


def sort(tokens: Tensor, num_rows: int) -> Ordered:
    """Return the sorted tokens (N,), the position of each (N,), and where rows begin (V + 1,)."""
    # A GPU sorts by digits of the numbers: the narrower, the fewer passes.
    narrow = tokens.flatten().to(torch.int16 if num_rows <= 2**15 else torch.int32)
    ordered, order = torch.sort(narrow, stable=True)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=tokens.device)
    return ordered, order, torch.searchsorted(ordered.int(), rows, out_int32=True)


@torch.library.custom_op("nanochat_flows::add_lookup_gradient", mutates_args=())
def add_lookup_gradient(
    grad: Tensor, ordered: Tensor, order: Tensor, starts: Tensor, number: int
) -> Tensor:
    """Add grad (..., C), of the tokens that `sort` ordered, to a GradientSum; return any scalar.

    Opaque to torch's compiler, to which it changes nothing: the sum is no part of a graph.
    """
    total, holds = take_by_number(number)
    rows = grad.reshape(-1, grad.size(-1)).contiguous()
    if grad.device.type == "cpu":
        add_in_torch(rows, ordered, order, starts, total, holds=holds)
    else:
        from nanochat_core.model.tables.kernel import add  # imports triton

        add(rows, ordered, order, starts, total, holds=holds)
    return total.new_empty(())


@add_lookup_gradient.register_fake
def _(grad: Tensor, ordered: Tensor, order: Tensor, starts: Tensor, number: int) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


def add_in_torch(
    grad: Tensor, ordered: Tensor, order: Tensor, starts: Tensor, total: Tensor, *, holds: bool
) -> None:
    """Do what `kernel.add` does, on any device; on a GPU the order of sums varies."""
    if not holds:
        total.zero_()
    total.index_add_(0, ordered.int(), grad[order].float())
