"""Triton kernels that add the gradient of a linear map's matrix to its fp32 sum (stream-K).

The gradient grad.T @ x of a small matrix is few tiles with a long sum over tokens, which do not
divide evenly among a GPU's processors. So the steps of all tiles are numbered one after another,
and each program takes an equal share of them: the end of one tile, whole ones, the beginning of
another. It writes the sums of these pieces, and a second kernel adds each tile's to the sum, in
their order. The order depends on the shapes and the number of programs alone, and so do the bits.

Shapes: N tokens, O outputs, I inputs, P programs, S pieces of a program at most. A tile is (BM, BN)
of (O, I), and a step of its sum BK tokens.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.tools.tensor_descriptor import (  # pyright: ignore[reportMissingImports]
    TensorDescriptor,
)

PROGRAMS = 132  # the multiprocessors of an H100 SXM and an H200; one program fills one of them
TILE = (128, 256, 64)  # BM, BN, BK
STAGES, WARPS = 4, 8  # 192 KB of shared memory; two groups of four warps share a tile
ROWS = 16  # of a tile that a program of `add_pieces` adds up


@triton.jit
def sum_pieces(
    grad,
    x,
    pieces_ptr,
    steps,
    share,
    columns,
    num_steps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    S: tl.constexpr,
):
    """Program p: steps p * share up to (p + 1) * share of num_steps; a tile has `steps`.

    grad (N, O) and x (N, I), bf16, as descriptors; columns: tiles in a row of (O, I). pieces (P, S,
    BM, BN) fp32.
    """
    p = tl.program_id(0)
    first = p * share
    last = tl.minimum(first + share, num_steps)
    for s in tl.range(0, S):
        tile = first // steps + s
        begin = tl.maximum(tile * steps, first) - tile * steps
        end = tl.minimum((tile + 1) * steps, last) - tile * steps
        row, column = tile // columns * BM, tile % columns * BN
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for step in tl.range(begin, end):
            a = grad.load([step * BK, row])
            b = x.load([step * BK, column])
            total = tl.dot(a.T, b, total)
        if begin < end:
            at = (p * S + s).to(tl.int64) * (BM * BN)
            inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(pieces_ptr + at + inside, total)


@triton.jit
def add_pieces(
    pieces_ptr,
    sum_ptr,
    steps,
    share,
    columns,
    O,  # noqa: E741 - as in the shapes above
    I,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    S: tl.constexpr,
    HOLDS: tl.constexpr,
):
    """Program (t, b): add the pieces of ROWS rows of tile t to sum (O, I) fp32.

    Unless the sum HOLDS any gradients it is overwritten.
    """
    tile = tl.program_id(0)
    inside = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BN)[None, :]
    m, n = tile // columns * BM + inside, tile % columns * BN + column
    at = sum_ptr + m.to(tl.int64) * I + n
    mask = (m < O) & (n < I)
    total = tl.zeros((ROWS, BN), dtype=tl.float32)
    if HOLDS:
        total = tl.load(at, mask=mask, other=0.0)
    p = tile * steps // share
    while p * share < (tile + 1) * steps:
        piece = p * S + tile - p * share // steps
        total += tl.load(pieces_ptr + piece.to(tl.int64) * (BM * BN) + inside * BN + column)
        p += 1
    tl.store(at, total, mask=mask)


def add(grad: Tensor, x: Tensor, total: Tensor, *, holds: bool) -> None:
    """Add grad.T @ x to total (O, I) fp32, or overwrite it if it `holds` no gradients.

    grad (N, O) and x (N, I), bf16, contiguous; O and I multiples of 8.
    """
    for kernel, grid, args, options in launches(grad, x, total, holds=holds):
        kernel[grid](*args, **options)


def launches(
    grad: Tensor, x: Tensor, total: Tensor, *, holds: bool
) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    """Return what `add` launches: kernels, grids, arguments and options."""
    (num_tokens, outputs), inputs = grad.shape, x.size(1)
    tall, wide, deep = TILE
    columns = -(-inputs // wide)
    tiles, steps = -(-outputs // tall) * columns, -(-num_tokens // deep)
    share = -(-tiles * steps // PROGRAMS)
    most = -(-(share - 1) // steps) + 1  # pieces of a program, wherever in a tile it begins
    pieces = torch.empty(PROGRAMS, most, tall, wide, device=grad.device)
    descriptors = [
        TensorDescriptor.from_tensor(t, [deep, side]) for t, side in ((grad, tall), (x, wide))
    ]
    options = {"BM": tall, "BN": wide, "S": most, "num_warps": WARPS}
    numbers = steps, share, columns
    return [
        (
            sum_pieces,
            (PROGRAMS,),
            (*descriptors, pieces, *numbers, tiles * steps),
            {**options, "BK": deep, "num_stages": STAGES},
        ),
        (
            add_pieces,
            (tiles, tall // ROWS),
            (pieces, total, *numbers, outputs, inputs),
            {**options, "ROWS": ROWS, "HOLDS": holds},
        ),
    ]
