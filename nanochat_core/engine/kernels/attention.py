"""Triton kernel: attention of one token a row over its pages, with everything around it.

From the joined product of `qkv` it makes the query and the row's new key and value: rotary
position, then QK norm; the value embedding's gated share is added to the value. New key and value
are written to the row's page. Then the query attends to the keys in its window, which are read from
the pages in place.

The keys of a row are divided among S programs (split-K), or one row would occupy as few
multiprocessors as it has heads. Each stores its share of the weighted sum, and the last of them to
arrive adds them up: a kernel less in every layer.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head dim (a power of two), S programs
for a row and head, BK keys a program reads at once, P tokens of a page. Channels of q and k are in
pairs: (j, j + D/2) stand next to each other, see runners/weights.py. Pages are in the runner's
dtype; sums, `raw` and the shares are fp32.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import (  # pyright: ignore[reportMissingImports]
    gdc_launch_dependents,
    gdc_wait,
)


@triton.jit
def _rotated(raw_ptr, rotary_ptr, D: tl.constexpr, eps):
    """Return a head's vector (D,) of fp32, rotated and normalised.

    raw: D channels in pairs. rotary: D/2 pairs (cos, -sin) of the position.
    """
    d = tl.arange(0, D)
    a, b = tl.split(tl.reshape(tl.load(raw_ptr + d), (D // 2, 2)))
    cos, minus_sin = tl.split(tl.reshape(tl.load(rotary_ptr + d), (D // 2, 2)))
    x = tl.interleave(a * cos - b * minus_sin, b * cos + a * minus_sin)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)


@triton.jit
def _read_keys(
    query,
    top,
    total,
    mixed,
    keys_ptr,
    values_ptr,
    table,
    position,
    start,
    scale,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
):
    """Return (top, total, mixed) of the softmax with the keys before `position` added: BK of them
    from `start`, then those S * BK further right, and so on. keys, values: of the head, page 0."""
    d = tl.arange(0, D)
    while start < position:
        j = start + tl.arange(0, BK)
        seen = j < position
        page = tl.load(table + j // P, mask=seen, other=0).to(tl.int64)
        at = ((page * P + j % P) * (K * D))[:, None] + d[None, :]
        keys = tl.load(keys_ptr + at, mask=seen[:, None], other=0.0).to(tl.float32)
        values = tl.load(values_ptr + at, mask=seen[:, None], other=0.0).to(tl.float32)
        score = tl.where(seen, tl.sum(keys * query[None, :], axis=1) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        weight = tl.exp(score - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        mixed = mixed * shrink + tl.sum(weight[:, None] * values, axis=0)
        top = higher
        start += S * BK
    return top, total, mixed


@triton.jit
def _join(sums_ptr, stats_ptr, S: tl.constexpr, D: tl.constexpr):
    """Return the output (D,) of S programs' shares: sums (S, D), stats (S, 2)."""
    # volatile: other programs have written them, and L1 may hold what was there before.
    i = tl.arange(0, S)
    tops = tl.load(stats_ptr + i * 2, volatile=True)
    totals = tl.load(stats_ptr + i * 2 + 1, volatile=True)
    at = i[:, None] * D + tl.arange(0, D)[None, :]
    sums = tl.load(sums_ptr + at, volatile=True)
    share = tl.exp(tops - tl.max(tops, axis=0))
    return tl.sum(sums * share[:, None], axis=0) / tl.sum(share * totals, axis=0)


@triton.jit
def attend(
    rows_ptr,
    position_ptr,
    token_ptr,
    raw_ptr,
    rotary_ptr,
    embed_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    table_stride,
    sums_ptr,
    stats_ptr,
    arrived_ptr,
    out_ptr,
    N,
    window,
    scale,
    gate_scale,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, s, b): out[b, h] = attention of query head h of row b, with S - 1 others.

    rows (B,): each row's slot. position (B,) int32: of its token; -1: the row is stopped, it writes
    nothing and its output has no meaning. token (slots,) int64. raw (B, N): q of H heads, k and v
    of K, K gates. rotary (positions, D). embed (vocabulary, K * D): value embeddings, if GATED.
    keys, values (pages, P, K, D) of the layer. table (slots, table_stride) int32: pages of a slot.
    sums (B, H, S, D), stats (B, H, S, 2): scratch. arrived (B, H) int32: zeros before and after.
    out (B, H * D) in the runner's dtype. window: keys to the left that a query sees.
    """
    h, s, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv = h // (H // K)
    d = tl.arange(0, D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(rows_ptr + b)
    position = tl.load(position_ptr + b)
    raw = raw_ptr + b * N
    rotary = rotary_ptr + tl.maximum(position, 0) * D
    query = _rotated(raw + h * D, rotary, D, eps)
    table = table_ptr + slot * table_stride

    # Of the softmax so far: the largest score, the sum of weights, the weighted sum of values.
    # Finite, as a program without keys still takes a difference of two.
    top = tl.full((), -1e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((D,), dtype=tl.float32)
    if s == 0:  # begins with the token's own key and value
        key = _rotated(raw + (H + kv) * D, rotary, D, eps).to(keys_ptr.dtype.element_ty)
        value = tl.load(raw + (H + K + kv) * D + d)
        if GATED:
            gate = gate_scale * tl.sigmoid(tl.load(raw + (H + 2 * K) * D + kv))
            embedded = tl.load(embed_ptr + (tl.load(token_ptr + slot) * K + kv) * D + d)
            value += gate * embedded.to(tl.float32)
        value = value.to(values_ptr.dtype.element_ty)
        # Not twice: the first of the query heads that share the key writes it.
        if (position >= 0) & (h % (H // K) == 0):
            page = tl.load(table + position // P).to(tl.int64)
            at = ((page * P + position % P) * K + kv) * D + d
            tl.store(keys_ptr + at, key)
            tl.store(values_ptr + at, value)
        top = tl.sum(query * key.to(tl.float32), axis=0) * scale
        total = tl.full((), 1.0, tl.float32)
        mixed = value.to(tl.float32)

    top, total, mixed = _read_keys(
        query,
        top,
        total,
        mixed,
        keys_ptr + kv * D,
        values_ptr + kv * D,
        table,
        position,
        tl.maximum(position - window, 0) + s * BK,
        scale,
        K,
        D,
        S,
        BK,
        P,
    )
    if S == 1:
        tl.store(out_ptr + (b * H + h) * D + d, (mixed / total).to(out_ptr.dtype.element_ty))
    else:
        first = (b * H + h) * S
        tl.store(sums_ptr + (first + s) * D + d, mixed)
        tl.store(stats_ptr + (first + s) * 2, top)
        tl.store(stats_ptr + (first + s) * 2 + 1, total)
        # All threads' stores come before the one thread's count, which releases them.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + b * H + h, 1, sem="acq_rel") == S - 1:
            joined = _join(sums_ptr + first * D, stats_ptr + first * 2, S, D)
            tl.store(out_ptr + (b * H + h) * D + d, joined.to(out_ptr.dtype.element_ty))
            tl.store(arrived_ptr + b * H + h, 0)
