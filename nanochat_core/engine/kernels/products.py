"""Triton kernels: a layer's four matrix products for a few rows, and lm_head's.

    qkv   mixed = resid * x + first * x0;  raw = W_qkv @ norm(mixed)
    add   out = x + W @ y                              (after attention and after the MLP)
    up    y = relu(W_up @ norm(x))^2
    head  logits = softcap * tanh(W_head @ norm(x + backout * middle) / softcap)

One row of input is bound by reading the matrix, so a program loads `BN` whole matrix rows at once
and multiplies them with every row of input: each weight is read once from memory whatever B is.
With `PDL` (programmatic dependent launch, sm_90) it loads them before the previous kernel has
ended; `gdc_wait` then waits for that kernel, and `gdc_launch_dependents` lets the next one begin.

Shapes: B rows of a step, C width, KP the inputs of a matrix rounded up to a power of two, BN
outputs of a program, N outputs of a matrix, V vocabulary. Residual stream, `raw` and logits are
fp32; matrices W and the products' inputs y are in the runner's dtype (bf16 or fp32); sums are fp32.
Tensors are contiguous, rows first.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import (  # pyright: ignore[reportMissingImports]
    gdc_launch_dependents,
    gdc_wait,
)


@triton.jit
def _load_rows(w_ptr, n, N, num_in: tl.constexpr, KP: tl.constexpr):
    """Return rows n (BN,) of a matrix (N, num_in), as (BN, KP) with zeros beyond it."""
    k = tl.arange(0, KP)
    inside = (n < N)[:, None] & (k < num_in)[None, :]
    # 64-bit offsets: lm_head of a wide model has more than 2^31 bytes.
    return tl.load(w_ptr + n.to(tl.int64)[:, None] * num_in + k[None, :], mask=inside, other=0.0)


@triton.jit
def _product(w, y):
    """Return w (BN, KP) @ y (KP,), summed in fp32; y is rounded to w's dtype first."""
    y = y.to(w.dtype).to(tl.float32)
    return tl.sum(w.to(tl.float32) * y[None, :], axis=1)


@triton.jit
def _norm(x, C: tl.constexpr, eps):
    """Divide x (KP,), zeros from C on, by its root mean square."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps)


@triton.jit(do_not_specialize=["layer"])  # or layers 0, 1 and 16 would be recompiled
def qkv(
    x_ptr,
    x0_ptr,
    resid_ptr,
    first_ptr,
    w_ptr,
    mixed_ptr,
    raw_ptr,
    layer,
    N,
    eps,
    B: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Mix the stream with its first state, then multiply its norm with W_qkv (N, C).

    x, x0 (B, C) -> mixed (B, C), which `add` continues from, and raw (B, N). resid, first (depth,).
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    w = _load_rows(w_ptr, n, N, C, KP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    resid = tl.load(resid_ptr + layer)
    first = tl.load(first_ptr + layer)
    for b in tl.static_range(B):
        x = tl.load(x_ptr + b * C + k, mask=k < C, other=0.0)
        x0 = tl.load(x0_ptr + b * C + k, mask=k < C, other=0.0)
        mixed = resid * x + first * x0
        if tl.program_id(0) == 0:
            tl.store(mixed_ptr + b * C + k, mixed, mask=k < C)
        tl.store(raw_ptr + b * N + n, _product(w, _norm(mixed, C, eps)), mask=n < N)


@triton.jit
def add(
    x_ptr,
    y_ptr,
    w_ptr,
    out_ptr,
    copy_ptr,
    N,
    B: tl.constexpr,
    num_in: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x + W @ y, for W (N, num_in): x, out (B, N), y (B, num_in). `out` may be `x`.

    COPY: write the result to `copy` (B, N), too: the middle layer's, which backout reads.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    w = _load_rows(w_ptr, n, N, num_in, KP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for b in tl.static_range(B):
        y = tl.load(y_ptr + b * num_in + k, mask=k < num_in, other=0.0)
        out = tl.load(x_ptr + b * N + n, mask=n < N, other=0.0) + _product(w, y)
        tl.store(out_ptr + b * N + n, out, mask=n < N)
        if COPY:
            tl.store(copy_ptr + b * N + n, out, mask=n < N)


@triton.jit
def up(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    eps,
    B: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = relu(W @ norm(x))^2, for W (N, C): x (B, C), y (B, N) in the matrices' dtype."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    w = _load_rows(w_ptr, n, N, C, KP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for b in tl.static_range(B):
        x = tl.load(x_ptr + b * C + k, mask=k < C, other=0.0)
        y = tl.maximum(_product(w, _norm(x, C, eps)), 0.0)
        tl.store(y_ptr + b * N + n, (y * y).to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def head(
    x_ptr,
    middle_ptr,
    backout_ptr,
    w_ptr,
    logits_ptr,
    V,
    eps,
    softcap,
    B: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the final norm with W (V, C) and cap: x, middle (B, C) -> logits (B, V).

    backout (1,): the share of the middle layer's stream that is added, negative.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    w = _load_rows(w_ptr, n, V, C, KP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    backout = tl.load(backout_ptr).to(tl.float32)
    for b in tl.static_range(B):
        x = tl.load(x_ptr + b * C + k, mask=k < C, other=0.0)
        x += backout * tl.load(middle_ptr + b * C + k, mask=k < C, other=0.0)
        z = _product(w, _norm(x, C, eps)) / softcap
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
        tl.store(logits_ptr + b * V + n, softcap * tanh, mask=n < V)
