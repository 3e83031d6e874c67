"""Triton kernels that add the gradient of a lookup to the fp32 sum of a table's gradients.

Tokens are sorted, so the gradients of one row of the table are those of neighbouring positions. A
program adds the gradients of a row to the row's sum, in their order. At every BLOCK-th position a
row is divided, and other programs have summed the pieces before: no program adds more than BLOCK
gradients one after another. The order of a sum depends on the tokens alone, and so do its bits.

Shapes: N tokens, V rows of the table, C channels, D channels of a program.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 64  # positions
CHANNELS = 512  # D at most
AT_ONCE = 4  # rows that a program reads before it adds them: each read waits for memory
WARPS = 1  # of a program


@triton.jit
def added(
    total,
    rows_ptr,
    order_ptr,
    first,
    last,
    c,
    C: tl.constexpr,
    ORDERED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Return total (D,) with rows `first` up to `last` added: if ORDERED, those that order names.

    rows (..., C); c (D,): the channels.
    """
    while first < last:  # Triton's interpreter has no `range` of what a kernel has read
        for u in tl.static_range(AT_ONCE):
            i = first + u
            row = i.to(tl.int64)
            if ORDERED:
                row = tl.load(order_ptr + i, mask=i < last, other=0)
            at = rows_ptr + row * C + c
            total += tl.load(at, mask=(c < C) & (i < last), other=0.0).to(tl.float32)
        first += AT_ONCE
    return total


@triton.jit
def sum_pieces(
    grad_ptr,
    tokens_ptr,
    order_ptr,
    starts_ptr,
    pieces_ptr,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (b, d): sum the gradients in block b of the row that began before it: pieces[b].

    grad (N, C). tokens (N,), sorted; order (N,): the positions they had; starts (V + 1,): where a
    row begins among them. pieces (N / BLOCK, C) fp32; not set where no row enters the block.
    """
    b = tl.program_id(0)
    token = tl.load(tokens_ptr + b * BLOCK).to(tl.int32)
    if tl.load(starts_ptr + token) < b * BLOCK:
        last = tl.minimum(tl.load(starts_ptr + token + 1), (b + 1) * BLOCK)
        c = tl.program_id(1) * D + tl.arange(0, D)
        total = tl.zeros((D,), dtype=tl.float32)
        total = added(total, grad_ptr, order_ptr, b * BLOCK, last, c, C, True, AT_ONCE)
        tl.store(pieces_ptr + b.to(tl.int64) * C + c, total, mask=c < C)


@triton.jit
def add_rows(
    grad_ptr,
    order_ptr,
    starts_ptr,
    pieces_ptr,
    sum_ptr,
    C: tl.constexpr,
    D: tl.constexpr,
    HOLDS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program (v, d): add the gradients of row v to sum[v]; unless it HOLDS any, overwrite it.

    sum (V, C) fp32; the others as in `sum_pieces`.
    """
    v = tl.program_id(0)
    first, last = tl.load(starts_ptr + v), tl.load(starts_ptr + v + 1)
    if (first < last) | (not HOLDS):
        c = tl.program_id(1) * D + tl.arange(0, D)
        at = sum_ptr + v.to(tl.int64) * C + c
        total = tl.zeros((D,), dtype=tl.float32)
        if HOLDS:
            total = tl.load(at, mask=c < C, other=0.0)
        block = first // BLOCK + 1  # the first block that the row enters, if it is so long
        end = tl.minimum(last, block * BLOCK)
        total = added(total, grad_ptr, order_ptr, first, end, c, C, True, AT_ONCE)
        past = tl.cdiv(last, BLOCK)
        total = added(total, pieces_ptr, order_ptr, block, past, c, C, False, AT_ONCE)
        tl.store(at, total, mask=c < C)


def add(
    grad: Tensor, tokens: Tensor, order: Tensor, starts: Tensor, total: Tensor, *, holds: bool
) -> None:
    """Add grad (N, C) to the rows of total (V, C) fp32, or overwrite it if it `holds` no gradients.

    tokens (N,), sorted; order (N,) int64: the row of grad of each; starts (V + 1,) int32.
    """
    for kernel, grid, args, options in launches(grad, tokens, order, starts, total, holds=holds):
        kernel[grid](*args, **options)


def launches(
    grad: Tensor, tokens: Tensor, order: Tensor, starts: Tensor, total: Tensor, *, holds: bool
) -> list[tuple[Any, tuple[int, int], tuple[Tensor, ...], dict[str, int]]]:
    """Return what `add` launches: kernels, grids, arguments and options."""
    num_tokens, channels = grad.shape
    pieces = torch.empty(-(-num_tokens // BLOCK), channels, device=grad.device)
    lanes = min(CHANNELS, triton.next_power_of_2(channels))
    parts = -(-channels // lanes)
    options = {"C": channels, "D": lanes, "BLOCK": BLOCK, "AT_ONCE": AT_ONCE, "num_warps": WARPS}
    first = (grad, tokens, order, starts, pieces)
    second = (grad, order, starts, pieces, total)
    return [
        (sum_pieces, (len(pieces), parts), first, options),
        (add_rows, (len(total), parts), second, {**options, "HOLDS": holds}),
    ]
