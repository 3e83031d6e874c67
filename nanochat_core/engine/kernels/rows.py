"""Triton kernels at both ends of a step: rows of slots become embeddings, logits become tokens.

`embed` reads a row's token and writes the residual stream's first state; `sample` draws the next
token from the logits, with the rules and the random numbers of sampling.py, and advances the slot.
Sampling with a repetition penalty, with a top_k above MAX_CANDIDATES or with a top_p but no top_k
is not done here: the runner then samples in torch.

Shapes: B rows, C width, V vocabulary, VP and CP the next powers of two, KP candidates that are
ranked, a power of two. State has a row a slot, see `State` in runners/device_state.py: token,
prev_token, length, limit, key and top_k int64, stopped bool, other settings fp32.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra.cuda import (  # pyright: ignore[reportMissingImports]
    gdc_launch_dependents,
    gdc_wait,
)

# Of SplitMix64 and of the uniform numbers, as in sampling.py.
GOLDEN = tl.constexpr(-7046029254386353131)
MIX1 = tl.constexpr(-4658895280553007687)
MIX2 = tl.constexpr(-7723592293110705685)
UNIFORM_BITS = tl.constexpr(23)
UNIFORM_MASK = tl.constexpr((1 << 23) - 1)
WEIGHT_UNIT = tl.constexpr(2147483648.0)  # weights are summed as integers of 2^-31
TINY = tl.constexpr(1e-30)  # stands for a temperature or a top_p of 0
TILE = tl.constexpr(4096)  # logits of one pass over the whole vocabulary
LINE = tl.constexpr(32)
ABOVE_BITS = tl.constexpr(12)  # of a count: at most KP logits are above the threshold
ABOVE_MASK = tl.constexpr((1 << 12) - 1)
LEAST = tl.constexpr(-3.4028234663852886e38)  # of fp32; stands for NaN


@triton.jit(do_not_specialize=["B"])
def embed(
    rows_ptr,
    token_ptr,
    prev_token_ptr,
    length_ptr,
    limit_ptr,
    stopped_ptr,
    embed_ptr,
    smear_ptr,
    resid_ptr,
    first_ptr,
    position_ptr,
    x0_ptr,
    x_ptr,
    stream_ptr,
    squares_ptr,
    B,
    C: tl.constexpr,
    CP: tl.constexpr,
    PARTS: tl.constexpr,
    PP: tl.constexpr,
    SMEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b: x0[b] = the token's embedding, plus smear's share of its predecessor's.

    rows (B,): each row's slot. embed (V, C), normalised; smear (V, 1): gates, read if SMEAR.
    position (B,) int32: the token's; -1 if the slot is stopped or at its limit. x0 (B, C) fp32.
    x (B, C) fp32: the first layer's input, resid[0] * x0 + first[0] * x0. stream and squares, as
    `add` of products.py writes them, unless PARTS is 0.
    """
    b = tl.program_id(0)
    k = tl.arange(0, CP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(rows_ptr + b)
    token = tl.load(token_ptr + slot)
    length = tl.load(length_ptr + slot)
    continues = (tl.load(stopped_ptr + slot) == 0) & (length + 1 < tl.load(limit_ptr + slot))
    tl.store(position_ptr + b, tl.where(continues, length, -1).to(tl.int32))
    x = tl.load(embed_ptr + token * C + k, mask=k < C, other=0.0).to(tl.float32)
    if SMEAR:
        prev_token = tl.load(prev_token_ptr + slot)  # there is one: a prompt has a token
        gate = tl.load(smear_ptr + token).to(tl.float32)
        prev = tl.load(embed_ptr + prev_token * C + k, mask=k < C, other=0.0)
        x += gate * prev.to(tl.float32)
    tl.store(x0_ptr + b * C + k, x, mask=k < C)
    x = tl.load(resid_ptr) * x + tl.load(first_ptr) * x
    tl.store(x_ptr + b * C + k, x, mask=k < C)
    if PARTS > 0:
        tl.store(stream_ptr + b * C + k, x.to(stream_ptr.dtype.element_ty), mask=k < C)
        part = tl.arange(0, PP)
        squares = tl.where(part == 0, tl.sum(x * x, axis=0), 0.0)
        tl.store(squares_ptr + part * B + b, squares, mask=part < PARTS)


@triton.jit
def _shift(x, bits: tl.constexpr):
    """Shift int64 right logically."""
    return (x.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def _uniform(key, position):
    """Return the row's number for `position`, an integer of 0 to 2^23 - 1, as `uniforms` has it."""
    x = key + (position + 1) * GOLDEN
    x = (x ^ _shift(x, 30)) * MIX1
    x = (x ^ _shift(x, 27)) * MIX2
    x = x ^ _shift(x, 31)
    return _shift(x, 64 - UNIFORM_BITS)


@triton.jit
def _threshold(number, total):
    """Return number / 2^23 x total, of int64, rounded down, without overflow."""
    low = total & UNIFORM_MASK
    return (total >> UNIFORM_BITS) * number + ((low * number) >> UNIFORM_BITS)


@triton.jit
def _load_logits(logits_ptr, i, V: tl.constexpr):
    """Return logits i, the least number in place of NaN and beyond the vocabulary."""
    z = tl.load(logits_ptr + i, mask=i < V, other=LEAST)
    return tl.where(z == z, z, LEAST)


@triton.jit
def _weights(z, top, temperature):
    """Return exp((z - top) / temperature) as integers of 2^-31."""
    return (tl.exp((z - top) / tl.maximum(temperature, TINY)) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def _sample_all(logits_ptr, temperature, number, V: tl.constexpr, VP: tl.constexpr):
    """Return the token that `number` picks of the whole vocabulary, in the order of ids."""
    top = tl.max(_load_logits(logits_ptr, tl.arange(0, VP), V), axis=0)
    total = tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        i = start + tl.arange(0, TILE)
        weight = _weights(_load_logits(logits_ptr, i, V), top, temperature)
        total += tl.sum(tl.where(i < V, weight, 0), axis=0)
    threshold = _threshold(number, total)
    # The token is the number of sums up to each weight that do not exceed the threshold.
    token = tl.full((), 0, tl.int32)
    before = tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        i = start + tl.arange(0, TILE)
        weight = _weights(_load_logits(logits_ptr, i, V), top, temperature)
        weight = tl.where(i < V, weight, 0)
        passed = (before + tl.cumsum(weight, axis=0) <= threshold) & (i < V)
        token += tl.sum(passed.to(tl.int32), axis=0)
        before += tl.sum(weight, axis=0)
    return tl.minimum(token, V - 1)


@triton.jit
def _ordered(bits):
    """Map the bits of fp32 numbers to int32 of the same order. It is its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _sample_ranked(
    logits_ptr,
    scratch_ptr,
    temperature,
    top_k,
    top_p,
    number,
    V: tl.constexpr,
    VP: tl.constexpr,
    KP: tl.constexpr,
):
    """Return the token that `number` picks of the likeliest, in their order, equals by id.

    scratch (KP,) int64.
    """
    i = tl.arange(0, VP)
    bits = _ordered(_load_logits(logits_ptr, i, V).to(tl.int32, bitcast=True))
    # By bisection, a threshold that at least top_k logits reach, and KP at most but for equals.
    low = tl.min(tl.where(i < V, bits, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(bits, axis=0).to(tl.int64) + 1
    reach = tl.full((), V, tl.int32)
    while (reach > KP) & (high - low > 1):
        middle = (low + high) // 2
        # Compared as int32: as int64 the vocabulary would take twice the registers, and spill.
        count = tl.sum((bits >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(count >= top_k, middle, low)
        reach = tl.where(count >= top_k, count, reach)
        high = tl.where(count >= top_k, high, middle)
    room = KP - tl.sum(((bits > low) & (i < V)).to(tl.int32), axis=0)
    # Those above first, then equals while there is room, each counted in a half of one number: one
    # sum over lines of LINE logits, for which a few lanes add up their own.
    counted = tl.full((), 0, tl.int32)
    j = tl.arange(0, TILE // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    for start in range(0, V, TILE):  # in tiles, or registers would spill
        tile = _ordered(_load_logits(logits_ptr, start + j, V).to(tl.int32, bitcast=True))
        above = (tile > low) & (start + j < V)
        equal = (tile == low) & (start + j < V)
        one = above.to(tl.int32) + (equal.to(tl.int32) << ABOVE_BITS)
        of_line = tl.sum(one, axis=1)
        before = counted + tl.cumsum(of_line, axis=0) - of_line
        count = before[:, None] + tl.cumsum(one, axis=1)
        rank = count >> ABOVE_BITS
        place = tl.where(above, count & ABOVE_MASK, KP - room + rank) - 1
        # A logit above, its id below and negated: keys have the order of the candidates.
        key = (tile.to(tl.int64) << 32) | (0x7FFFFFFF - start - j).to(tl.int64)
        tl.store(scratch_ptr + place, key, mask=above | (equal & (rank <= room)))
        counted += tl.sum(of_line, axis=0)
    placed = KP - room + tl.minimum(counted >> ABOVE_BITS, room)
    tl.debug_barrier()  # other threads' stores are read next
    rank = tl.arange(0, KP)
    least = -0x7FFFFFFFFFFFFFFF
    keys = tl.load(scratch_ptr + rank, mask=rank < placed, other=least, volatile=True)
    keys = tl.sort(keys, descending=True)
    ids = 0x7FFFFFFF - (keys & 0xFFFFFFFF).to(tl.int32)
    z = _ordered((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)

    competes = (rank < top_k) & (rank < placed)
    top = tl.max(tl.where(competes, z, LEAST), axis=0)
    z = tl.where(competes, z, LEAST)
    weight = tl.where(competes, _weights(z, top, temperature), 0)
    if top_p < 1.0:
        # The weight with which the sum crosses the share is still needed.
        before = (tl.cumsum(weight, axis=0) - weight).to(tl.float32)
        needed = tl.maximum(top_p, TINY) * tl.sum(weight, axis=0).to(tl.float32)
        weight = tl.where(before < needed, weight, 0)
    threshold = _threshold(number, tl.sum(weight, axis=0))
    choice = tl.sum((tl.cumsum(weight, axis=0) <= threshold).to(tl.int32), axis=0)
    return tl.sum(tl.where(rank == tl.minimum(choice, KP - 1), ids, 0), axis=0)


@triton.jit
def sample(
    rows_ptr,
    position_ptr,
    logits_ptr,
    token_ptr,
    prev_token_ptr,
    length_ptr,
    limit_ptr,
    key_ptr,
    stopped_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    stops_ptr,
    scratch_ptr,
    out_ptr,
    V: tl.constexpr,
    VP: tl.constexpr,
    KP: tl.constexpr,
    num_stops: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b: sample row b's next token from logits (B, V), capped, and advance its slot.

    position (B,): as `embed` wrote it. stops (num_stops,) int64: the tokens that stop a slot.
    scratch (B, KP) int64. out (B,) int64: the token, -1 for a stopped row, which changes nothing.
    """
    b = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(rows_ptr + b)
    new = tl.full((), -1, tl.int64)
    if tl.load(position_ptr + b) < 0:
        tl.store(stopped_ptr + slot, True)
    else:
        logits = logits_ptr + b.to(tl.int64) * V
        length = tl.load(length_ptr + slot)
        temperature = tl.load(temperature_ptr + slot)
        top_k = tl.load(top_k_ptr + slot)
        top_p = tl.load(top_p_ptr + slot)
        number = _uniform(tl.load(key_ptr + slot), length + 1)
        if temperature <= 0.0:  # the lowest id of equals
            chosen = tl.argmax(_load_logits(logits, tl.arange(0, VP), V), axis=0)
        elif (top_k < V) | (top_p < 1.0):
            chosen = _sample_ranked(
                logits, scratch_ptr + b * KP, temperature, top_k, top_p, number, V, VP, KP
            )
        else:
            chosen = _sample_all(logits, temperature, number, V, VP)
        new = chosen.to(tl.int64)
        # All threads have read the slot before one of them writes it.
        tl.debug_barrier()
        i = tl.arange(0, num_stops)
        is_stop = tl.max((tl.load(stops_ptr + i) == new).to(tl.int32), axis=0) > 0
        is_last = length + 2 >= tl.load(limit_ptr + slot)
        tl.store(prev_token_ptr + slot, tl.load(token_ptr + slot))
        tl.debug_barrier()
        tl.store(token_ptr + slot, new)
        tl.store(length_ptr + slot, length + 1)
        tl.store(stopped_ptr + slot, is_stop | is_last)
    tl.store(out_ptr + b, new)
