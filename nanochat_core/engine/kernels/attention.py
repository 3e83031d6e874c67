"""Triton kernel: attention of one token a row over its pages, with everything around it.

From the joined product of `qkv` it makes the query and the row's new key and value: rotary
position, then QK norm; the value embedding's gated share is added to the value. New key and value
are written to the row's page. Then the query attends to the keys in its window, which are read from
the pages in place.

The keys of a row are divided among S programs (split-K), or one row would occupy as few
multiprocessors as it has heads. Each stores its share of the weighted sum, and the last of them to
arrive adds them up: a kernel less in every layer. Tensor cores multiply keys with the query and
values with their weights, both rounded to the pages' dtype.

Shapes: B rows, H query heads, K key/value heads, G = H / K, D head dim (a power of two), S programs
for a row and head (SP: rounded up to a power of two), BK keys a program reads at once, P tokens of
a page. Channels of q and k are in
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
def _rotated(raw_ptr, cos, sin, D: tl.constexpr, eps):
    """Return a head's vector (D,) of fp32, rotated and normalised.

    raw: D channels in pairs. cos, sin (D,): of each channel, sin with its sign.
    """
    d = tl.arange(0, D)
    x = tl.load(raw_ptr + d) * cos + tl.load(raw_ptr + (d ^ 1)) * sin
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)


@triton.jit
def _load_keys(
    keys_ptr,
    values_ptr,
    table,
    position,
    start,
    K: tl.constexpr,
    D: tl.constexpr,
    BK: tl.constexpr,
    P: tl.constexpr,
):
    """Return the BK keys and values from `start`, a multiple of BK, (BK, D) each, zeros from
    `position` on. keys, values: of the head, page 0.

    Not from L1: a step may have written them since this multiprocessor read their place.
    """
    i = tl.arange(0, BK)
    j = start + i
    if P % BK == 0:  # they are in one page
        page = tl.load(table + start // P, mask=start < position, other=0, cache_modifier=".cg")
        first = (page.to(tl.int64) * P + start % P) * (K * D)
        at = first + (i[:, None] * (K * D) + tl.arange(0, D)[None, :])
    else:
        page = tl.load(table + j // P, mask=j < position, other=0, cache_modifier=".cg")
        at = ((page.to(tl.int64) * P + j % P) * (K * D))[:, None] + tl.arange(0, D)[None, :]
    seen = (j < position)[:, None]
    keys = tl.load(keys_ptr + at, mask=seen, other=0.0, cache_modifier=".cg")
    values = tl.load(values_ptr + at, mask=seen, other=0.0, cache_modifier=".cg")
    return keys, values


@triton.jit
def _write(
    keys_ptr,
    values_ptr,
    table,
    position,
    key,
    value,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
):
    """Write a position's key and value (D,) to its page; nothing of a stopped row's."""
    if position >= 0:
        page = tl.load(table + position // P, cache_modifier=".cg").to(tl.int64)
        at = (page * P + position % P) * (K * D) + tl.arange(0, D)
        tl.store(keys_ptr + at, key)
        tl.store(values_ptr + at, value)


@triton.jit
def _add_keys(
    top,
    total,
    mixed,
    query,
    keys,
    values,
    start,
    low,
    position,
    scale,
    D: tl.constexpr,
    BK: tl.constexpr,
):
    """Return (top, total, mixed) of the softmax with BK keys from `start` added, those from `low`
    to `position`."""
    j = start + tl.arange(0, BK)
    seen = (j >= low) & (j < position)
    # On tensor cores, whose products have 8 columns at least: all are the query.
    columns = tl.broadcast_to(query.to(keys.dtype)[:, None], (D, 8))
    score = tl.max(tl.dot(keys, columns, input_precision="ieee"), axis=1) * scale
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=0))
    weight = tl.exp(score - higher)
    shrink = tl.exp(top - higher)
    total = total * shrink + tl.sum(weight, axis=0)
    columns = tl.broadcast_to(weight.to(values.dtype)[:, None], (BK, 8))
    found = tl.dot(tl.trans(values), columns, input_precision="ieee")
    mixed = mixed * shrink + tl.max(found, axis=1)
    return higher, total, mixed


@triton.jit
def _join(sums_ptr, stats_ptr, S: tl.constexpr, SP: tl.constexpr, D: tl.constexpr):
    """Return the output (D,) of S programs' shares: sums (S, D), stats (S, 2)."""
    # volatile: other programs have written them, and L1 may hold what was there before.
    i = tl.arange(0, SP)
    tops = tl.load(stats_ptr + i * 2, mask=i < S, other=-1e30, volatile=True)
    totals = tl.load(stats_ptr + i * 2 + 1, mask=i < S, other=0.0, volatile=True)
    at = i[:, None] * D + tl.arange(0, D)[None, :]
    sums = tl.load(sums_ptr + at, mask=(i < S)[:, None], other=0.0, volatile=True)
    share = tl.exp(tops - tl.max(tops, axis=0))
    return tl.sum(sums * share[:, None], axis=0) / tl.sum(share * totals, axis=0)


@triton.jit
def _finish(
    out_ptr,
    sums_ptr,
    stats_ptr,
    arrived_ptr,
    s,
    top,
    total,
    mixed,
    S: tl.constexpr,
    SP: tl.constexpr,
    D: tl.constexpr,
):
    """Store a program's share; the last of S to arrive writes the output (D,) of them all."""
    d = tl.arange(0, D)
    if S == 1:
        tl.store(out_ptr + d, (mixed / total).to(out_ptr.dtype.element_ty))
    else:
        tl.store(sums_ptr + s * D + d, mixed)
        tl.store(stats_ptr + s * 2, top)
        tl.store(stats_ptr + s * 2 + 1, total)
        # All threads' stores come before the one thread's count, which releases them.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == S - 1:
            joined = _join(sums_ptr, stats_ptr, S, SP, D)
            tl.store(out_ptr + d, joined.to(out_ptr.dtype.element_ty))
            tl.store(arrived_ptr, 0)


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
    SP: tl.constexpr,
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
    # What `qkv` does not write is read before the wait for it. Each kernel lets the next one begin
    # only after its own wait, so all before `qkv` have ended by now: `embed`, which writes the
    # position, and earlier steps, which wrote keys and values. That order must stay.
    slot = tl.load(rows_ptr + b)
    position = tl.load(position_ptr + b, cache_modifier=".cg")
    table = table_ptr + slot * table_stride
    keys_ptr += kv * D
    values_ptr += kv * D
    low = tl.maximum(position - window, 0)
    start = (low // BK + s) * BK
    keys, values = _load_keys(keys_ptr, values_ptr, table, position, start, K, D, BK, P)
    rotary = rotary_ptr + tl.maximum(position, 0) * D
    cos = tl.load(rotary + d // 2 * 2)
    sin = tl.load(rotary + (d | 1)) * (d % 2 * 2 - 1)
    embedded = 0.0
    if GATED:
        token = tl.load(token_ptr + slot, cache_modifier=".cg")
        embedded = tl.load(embed_ptr + (token * K + kv) * D + d).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    raw = raw_ptr + b * N
    query = _rotated(raw + h * D, cos, sin, D, eps)

    # Of the softmax so far: the largest score, the sum of weights, the weighted sum of values.
    # Finite, as a program without keys still takes a difference of two.
    top = tl.full((), -1e30, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.zeros((D,), dtype=tl.float32)
    if s == 0:  # begins with the token's own key and value
        key = _rotated(raw + (H + kv) * D, cos, sin, D, eps).to(keys_ptr.dtype.element_ty)
        value = tl.load(raw + (H + K + kv) * D + d)
        if GATED:
            value += gate_scale * tl.sigmoid(tl.load(raw + (H + 2 * K) * D + kv)) * embedded
        value = value.to(values_ptr.dtype.element_ty)
        # Not twice: the first of the query heads that share the key writes it.
        if h % (H // K) == 0:
            _write(keys_ptr, values_ptr, table, position, key, value, K, D, P)
        top = tl.sum(query * key.to(tl.float32), axis=0) * scale
        total = tl.full((), 1.0, tl.float32)
        mixed = value.to(tl.float32)

    if start < position:
        top, total, mixed = _add_keys(
            top, total, mixed, query, keys, values, start, low, position, scale, D, BK
        )
    start += S * BK
    while start < position:
        keys, values = _load_keys(keys_ptr, values_ptr, table, position, start, K, D, BK, P)
        top, total, mixed = _add_keys(
            top, total, mixed, query, keys, values, start, low, position, scale, D, BK
        )
        start += S * BK
    row = b * H + h
    out, sums, stats = out_ptr + row * D, sums_ptr + row * S * D, stats_ptr + row * S * 2
    _finish(out, sums, stats, arrived_ptr + row, s, top, total, mixed, S, SP, D)
