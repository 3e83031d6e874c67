"""Triton kernels: a layer's four matrix products for any number of rows, and lm_head's.

    qkv   raw = W_qkv @ norm(x)
    add   x = x + W @ y                                (after attention and after the MLP)
    up    inner = relu(W_up @ norm(x))^2
    head  logits = softcap * tanh(W_head @ norm(x) / softcap)

After the MLP `add` also mixes the residual stream for what comes next: x = scale * x + share *
other, where `other` is the stream's first state or, after the last layer, the middle layer's.

Each weight is read once for all rows of a program. One row is bound by latency: a program loads
`BN` whole matrix rows into registers and multiplies them on CUDA cores. From two rows on tensor
cores multiply them, 8, 16 or 32 rows in a program. Its warps divide the channels: a warp with all
of them would wait for one product after the other. There the norm's factor, a number of the row,
is applied to the product: `add` leaves x in the matrices' dtype, for the product, and the sum of
squares of each program's part of it. The channels are summed in one order for 2 and more rows.

With `PDL` (programmatic dependent launch, sm_90) a kernel asks for weights before the previous one
has ended; `gdc_wait` then waits for that kernel, and `gdc_launch_dependents` lets the next begin.

Shapes: B rows of a step, RB of a program, K inputs of a matrix, N outputs, BN of a program, V
vocabulary; KP inputs that a program reads at once, for one row all, rounded up to a power of two.
PARTS programs that wrote x, PP: rounded up likewise. Residual stream, `raw` and logits are fp32;
matrices W and the products' inputs y are in the runner's dtype (bf16 or fp32); sums are fp32.
Tensors are contiguous, rows first.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import (  # pyright: ignore[reportMissingImports]
    gdc_launch_dependents,
    gdc_wait,
)

STAGES = tl.constexpr(4)  # steps of the loop whose loads are under way at once
WARPS = tl.constexpr(4)  # that divide the channels
# By one thread of the program, as all would ask for the same bytes.
PREFETCH = tl.constexpr("""{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.u32 $0, 0;
}""")


@triton.jit
def _begin(w_ptr, n, N, K: tl.constexpr, KP: tl.constexpr, RB: tl.constexpr, BN: tl.constexpr, PDL):
    """Ask for matrix rows n (BN,), then wait for the previous kernel. Returns for one row the
    matrix rows, (BN, KP) with zeros beyond the matrix; else they are on their way to L2."""
    if RB == 1:
        k = tl.arange(0, KP)
        inside = (n < N)[:, None] & (k < K)[None, :]
        # 64-bit offsets: lm_head of a wide model has more than 2^31 bytes.
        w = tl.load(w_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0.0)
    else:
        w = 0
        size: tl.constexpr = K * w_ptr.dtype.element_ty.primitive_bitwidth // 8
        if PDL and size % 16 == 0:
            first = tl.program_id(0) * BN
            at = (w_ptr + first.to(tl.int64) * K).to(tl.int64)
            count = tl.minimum(N - first, BN) * size
            tl.inline_asm_elementwise(
                PREFETCH, "=r,l,r", [at, count], dtype=tl.int32, is_pure=False, pack=1
            )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    return w


@triton.jit
def _multiply_one(w, y):
    """Return w (BN, KP) @ y (KP,) as (BN, 1), summed in fp32; y is rounded to w's dtype first."""
    y = y.to(w.dtype).to(tl.float32)
    return tl.sum(w.to(tl.float32) * y[None, :], axis=1)[:, None]


@triton.jit
def _multiply(
    w,
    w_ptr,
    y_ptr,
    n,
    r,
    N,
    B,
    K: tl.constexpr,
    KP: tl.constexpr,
    RB: tl.constexpr,
    BN: tl.constexpr,
):
    """Return W[n] @ y[r]^T, (BN, RB) of fp32: y (B, K). w: of `_begin`."""
    if RB == 1:
        k = tl.arange(0, KP)
        z = _multiply_one(w, tl.load(y_ptr + k, mask=k < K, other=0.0))
    else:
        # (warp, matrix row or row, channel)
        warp = tl.arange(0, WARPS)[:, None, None]
        k = warp * (KP // WARPS) + tl.arange(0, KP // WARPS)[None, None, :]
        n, r = n[None, :, None], r[None, :, None]
        z = tl.zeros((WARPS, BN, RB), dtype=tl.float32)
        for start in tl.range(0, K, KP, num_stages=STAGES):
            at = start + k
            of_w = tl.load(w_ptr + n.to(tl.int64) * K + at, mask=(n < N) & (at < K), other=0.0)
            of_y = tl.load(y_ptr + r * K + at, mask=(r < B) & (at < K), other=0.0)
            z = tl.dot(of_w, tl.permute(of_y, (0, 2, 1)), z, input_precision="ieee")
        z = tl.sum(z, axis=0)
    return z


@triton.jit
def _normed_product(
    y_ptr,
    squares_ptr,
    w_ptr,
    n,
    r,
    B,
    N,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    RB: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    PP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return W[n] @ norm(y[r])^T, (BN, RB) of fp32. y (B, K): for one row in fp32, and `squares`
    (PARTS, B) is not read."""
    w = _begin(w_ptr, n, N, K, KP, RB, BN, PDL)
    if RB == 1:
        # Before the product: after it a third fewer programs would fit, as weights stood waiting in
        # fp32. The chain of two reductions is the price.
        k = tl.arange(0, KP)
        y = tl.load(y_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / K + eps)
        z = _multiply_one(w, y)
    else:
        part = tl.arange(0, PP)[:, None]
        inside = (part < PARTS) & (r < B)[None, :]
        squares = tl.load(squares_ptr + part * B + r[None, :], mask=inside, other=0.0)
        z = _multiply(w, w_ptr, y_ptr, n, r, N, B, K, KP, RB, BN)
        z *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[None, :]
    return z


@triton.jit
def _store(out_ptr, n, r, N, B, z):
    """Store z (BN, RB) as rows r of `out` (B, N)."""
    inside = (n < N)[:, None] & (r < B)[None, :]
    at = r.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptr + at, z.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B"])  # or each number of rows would be compiled
def qkv(
    y_ptr,
    squares_ptr,
    w_ptr,
    raw_ptr,
    B,
    N,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    RB: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    PP: tl.constexpr,
    PDL: tl.constexpr,
):
    """raw = W @ norm(y): y (B, K), W (N, K), raw (B, N); squares (PARTS, B): of y."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * RB + tl.arange(0, RB)
    z = _normed_product(y_ptr, squares_ptr, w_ptr, n, r, B, N, eps, K, KP, RB, BN, PARTS, PP, PDL)
    _store(raw_ptr, n, r, N, B, z)


@triton.jit(do_not_specialize=["B"])
def up(
    y_ptr,
    squares_ptr,
    w_ptr,
    inner_ptr,
    B,
    N,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    RB: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    PP: tl.constexpr,
    PDL: tl.constexpr,
):
    """inner = relu(W @ norm(y))^2: as `qkv`, but for inner (B, N) in the matrices' dtype."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * RB + tl.arange(0, RB)
    z = _normed_product(y_ptr, squares_ptr, w_ptr, n, r, B, N, eps, K, KP, RB, BN, PARTS, PP, PDL)
    z = tl.maximum(z, 0.0)
    _store(inner_ptr, n, r, N, B, z * z)


@triton.jit(do_not_specialize=["B"])
def head(
    y_ptr,
    squares_ptr,
    w_ptr,
    logits_ptr,
    B,
    N,
    eps,
    softcap,
    K: tl.constexpr,
    KP: tl.constexpr,
    RB: tl.constexpr,
    BN: tl.constexpr,
    PARTS: tl.constexpr,
    PP: tl.constexpr,
    PDL: tl.constexpr,
):
    """logits = W @ norm(y), capped: as `qkv`, for N = V."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * RB + tl.arange(0, RB)
    z = _normed_product(y_ptr, squares_ptr, w_ptr, n, r, B, N, eps, K, KP, RB, BN, PARTS, PP, PDL)
    tanh = 1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0)
    _store(logits_ptr, n, r, N, B, softcap * tanh)


@triton.jit(do_not_specialize=["B", "index"])
def add(
    x_ptr,
    y_ptr,
    w_ptr,
    stream_ptr,
    squares_ptr,
    copy_ptr,
    scale_ptr,
    share_ptr,
    other_ptr,
    index,
    B,
    N,
    K: tl.constexpr,
    KP: tl.constexpr,
    RB: tl.constexpr,
    BN: tl.constexpr,
    COPY: tl.constexpr,
    MIX: tl.constexpr,
    PDL: tl.constexpr,
):
    """x = x + W @ y, for W (N, K), x (B, N) fp32, y (B, K).

    COPY: store it in `copy` (B, N), too: the middle layer's. MIX: then x = scale[index] * x +
    share[index] * other, for other (B, N). From two rows on stream (B, N) is x in W's dtype, and
    squares (programs, B) the sums of squares of each program's outputs.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.program_id(1) * RB + tl.arange(0, RB)
    w = _begin(w_ptr, n, N, K, KP, RB, BN, PDL)
    inside = (n < N)[:, None] & (r < B)[None, :]
    at = r[None, :] * N + n[:, None]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    x += _multiply(w, w_ptr, y_ptr, n, r, N, B, K, KP, RB, BN)
    if COPY:
        tl.store(copy_ptr + at, x, mask=inside)
        tl.debug_barrier()  # after the last layer, `other` may be what was just stored
    if MIX:
        scale = tl.load(scale_ptr + index).to(tl.float32)
        share = tl.load(share_ptr + index).to(tl.float32)
        x = scale * x + share * tl.load(other_ptr + at, mask=inside, other=0.0)
    tl.store(x_ptr + at, x, mask=inside)
    if RB > 1:
        tl.store(stream_ptr + at, x.to(stream_ptr.dtype.element_ty), mask=inside)
        tl.store(squares_ptr + tl.program_id(0) * B + r, tl.sum(x * x, axis=0), mask=r < B)
