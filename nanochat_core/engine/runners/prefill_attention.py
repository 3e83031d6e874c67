"""Attention of a prefill pass: all chunks in one call a layer, by torch's FlashAttention for
sequences of different lengths, where it can run; else chunk by chunk, by SDPA.

Shapes: N tokens of a pass, R of them whose logits are wanted, S keys that its chunks see, T tokens
of a chunk, H query heads, K key/value heads, D head dim.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.runner import Chunk
from nanochat_core.model.attention_backends import TOLERANCE, band

_LOG = logging.getLogger(__name__)

BLOCK = 128  # queries of a chunk that share one slice of keys and a mask

# (layer, its group, q (N, H, D), k and v (N, K, D)) -> (N, H, D), or (R, H, D) in the last layer.
# The group's pages hold k and v by then.
PassAttention: TypeAlias = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]

# (q, k, v, query_ends, key_ends, max_queries, max_keys, window=, scale=), see `varlen`.
Varlen: TypeAlias = Callable[..., Tensor]


def find_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> Varlen | None:
    """Return `varlen` if it can run here on this dtype and agrees with SDPA; None means it cannot,
    and the reason is logged."""
    if device.type != "cuda" or dtype == torch.float32:
        return None
    try:
        error = difference(varlen, device, dtype, head_dim)
        reason = f"it is off by {error:.3f}" if not error <= TOLERANCE else None
    except Exception as failure:  # noqa: BLE001 - kernels on unknown machines: any failure means
        # that they are not used.
        reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
    if reason is None:
        return varlen
    _LOG.warning("prompts are read chunk by chunk, torch's varlen_attn cannot run: %s", reason)
    return None


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    window: int,
    scale: float,
) -> Tensor:
    """Compute causal attention of sequences that lie one after the other: q (N, H, D), k and v
    (S, K, D) -> (N, H, D), in bf16 or fp16 on a GPU.

    query_ends, key_ends (sequences + 1,) int32: where each begins and the last ends. A sequence's
    last query stands at its last key. max_queries: of the longest sequence; max_keys: that many
    or more. Keys after the last end are not read.
    """
    from torch.nn.attention.varlen import varlen_attn

    if q.size(1) != k.size(1):  # varlen_attn of torch 2.11 has no groups of query heads
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
    # As ours, its window counts keys to the left without the query's own; -1: no limit.
    size = (window if window < max_keys - 1 else -1, 0)
    out = varlen_attn(
        q, k, v, query_ends, key_ends, max_queries, max_keys, scale=scale, window_size=size
    )
    assert isinstance(out, Tensor)  # a tuple only with `return_aux`
    return out


def difference(call: Varlen, device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Return how far a call deviates from SDPA, relative to the largest value: of a whole sequence
    and one whose first keys were read before, with and without a window that hides keys."""
    counts, lengths, heads, scale = (40, 3, 70), (40, 90, 200), 2, head_dim**-0.5
    generator = torch.Generator().manual_seed(1)

    def random(length: int) -> Tensor:
        return torch.randn(length, heads, head_dim, generator=generator).to(device, dtype)

    # One key more than is read, which must not change anything.
    q, k, v = random(sum(counts)), random(sum(lengths) + 1), random(sum(lengths) + 1)
    query_ends, key_ends = (
        torch.from_numpy(_ends(of)).to(device, torch.int32) for of in (counts, lengths)
    )
    worst = 0.0
    for window in (64, 200):
        longest = max(counts), max(lengths) + 1
        found = call(q, k, v, query_ends, key_ends, *longest, window=window, scale=scale)
        keys, values = (t[:-1].split(lengths) for t in (k, v))
        sequences = zip(q.split(counts), keys, values, strict=True)
        expected = torch.cat(
            [
                F.scaled_dot_product_attention(
                    *(t.transpose(0, 1) for t in one),
                    attn_mask=band(len(one[0]), len(one[1]), window, device),
                    scale=scale,
                ).transpose(0, 1)
                for one in sequences
            ]
        )
        error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        worst = float(error) if not error <= worst else worst  # NaN too
    return worst


class Keys(NamedTuple):
    """The keys of one group that the sequences of a pass see."""

    places: Tensor | None  # in its pages (S,); None: the pass's own
    ends: Tensor  # as of `varlen`
    max_keys: int


class Sequences(NamedTuple):
    """The sequences of a pass, which lie one after the other."""

    query_ends: Tensor
    max_queries: int
    keys: Sequence[Keys]  # of each group


def sequences_of(
    chunks: Sequence[Chunk], pools: Sequence[PagePool], device: torch.device
) -> Sequences:
    """Return the sequences of which chunks are the last tokens."""
    counts = [len(chunk.tokens) for chunk in chunks]
    query_ends = torch.from_numpy(_ends(counts)).to(device, torch.int32)
    # Prompts read whole see their own keys only: no need to gather them from pages.
    keys = [Keys(None, query_ends, max(counts))] * len(pools)
    if any(chunk.start for chunk in chunks):
        keys.clear()
        for pool in pools:
            places = [
                pool.places(c.slot, max(0, c.start - pool.group.window), c.start + len(c.tokens))
                for c in chunks
            ]
            lengths = [len(one) for one in places]
            ends = torch.from_numpy(_ends(lengths)).to(device, torch.int32)
            joined = torch.from_numpy(np.concatenate(places)).to(device)
            keys.append(Keys(joined, ends, max(lengths)))
    return Sequences(query_ends, max(counts), keys)


def attend_together(
    call: Varlen,
    pools: Sequence[PagePool],
    sequences: Sequences,
    wanted: Tensor,
    *,
    last_layer: int,
    scale: float,
) -> PassAttention:
    """Return the attention of all sequences in one call. wanted (R,): indices of the tokens whose
    logits are wanted."""
    query_ends, max_queries, keys = sequences

    def attend(layer: int, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == last_layer and not len(wanted):
            return q[:0]
        places, ends, max_keys = keys[group]
        if places is not None:
            k, v = pools[group].gather(layer, places)
        window = pools[group].group.window
        out = call(q, k, v, query_ends, ends, max_queries, max_keys, window=window, scale=scale)
        return out[wanted] if layer == last_layer else out

    return attend


def attend_each(
    pools: Sequence[PagePool], chunks: Sequence[Chunk], *, last_layer: int, scale: float
) -> PassAttention:
    """Return the attention of one chunk after the other, on any device and in any dtype."""

    def attend(layer: int, group: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs: list[Tensor] = []
        end = 0
        for chunk in chunks:
            first, end = end, end + len(chunk.tokens)
            # Of the last layer only the token whose logits are wanted is computed.
            if layer == last_layer:
                if not chunk.wants_logits:
                    continue
                first = end - 1
            # A prompt read whole sees its own keys only: no need to gather them from pages.
            whole = chunk.start == 0 and layer != last_layer
            own = (k[first:end], v[first:end]) if whole else None
            outs.append(_attend_chunk(pools[group], layer, chunk, q[first:end], own, scale))
        return torch.cat(outs) if outs else q[:0]

    return attend


def _attend_chunk(
    pool: PagePool,
    layer: int,
    chunk: Chunk,
    q: Tensor,
    own: tuple[Tensor, Tensor] | None,
    scale: float,
) -> Tensor:
    """Compute attention of a chunk's last tokens q (T, H, D). `own`: their k and v, if they are
    all keys that the chunk sees; None: read them from the pages."""
    window, end = pool.group.window, chunk.start + len(chunk.tokens)
    start = end - len(q)
    low = max(0, start - window)
    if own is None:
        keys, values = pool.read(layer, pool.find(chunk.slot, low, end))
    else:
        keys, values = (t.transpose(0, 1).unsqueeze(0) for t in own)
    q = q.transpose(0, 1).unsqueeze(0)  # (1, H, T, D)
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": q.size(1) != keys.size(1)}
    # Every key is inside the window: SDPA's causal path needs no mask.
    if start == 0 and window >= end - 1:
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, **settings)
        return out[0].transpose(0, 1)
    # In blocks, each with the keys of its windows: with one mask for all the CPU would also
    # multiply the keys that the mask hides.
    blocks: list[Tensor] = []
    for first in range(start, end, BLOCK):
        stop = min(first + BLOCK, end)
        seen = slice(max(0, first - window) - low, stop - low)
        mask = band(stop - first, seen.stop - seen.start, window, q.device)
        queries = q[:, :, first - start : stop - start]
        blocks.append(
            F.scaled_dot_product_attention(
                queries, keys[:, :, seen], values[:, :, seen], attn_mask=mask, **settings
            )
        )
    return torch.cat(blocks, dim=2)[0].transpose(0, 1)


def _ends(counts: Sequence[int]) -> np.ndarray:
    """Return where each of the sequences begins, and where the last ends: (sequences + 1,)."""
    return np.cumsum([0, *counts])
