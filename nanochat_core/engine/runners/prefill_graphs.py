"""A prefill pass over one chunk in one of a few lengths, so that CUDA graphs can hold it.

Padding stands after the chunk's tokens, where none of their queries sees it; its keys and values go
to the scratch page. A pass has one input, so that one copy sends it: of N tokens and of each of G
groups, int64,

    tokens, their predecessors, positions (N,) each; places in the pages (G * N,); the last token's
    index (1,); of a chunk that continues: number of keys before it (1,) and places of all (P + N,)
    for each group

Shapes: N tokens of a pass with its padding, P keys before it that there is room for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.runner import Chunk
from nanochat_core.engine.runners.prefill_attention import Keys, Sequences

LENGTHS = (128, 256, 512, 1024, 2048)
MAX_BEFORE = 2048  # keys before a chunk


@dataclass(frozen=True)
class PassKind:
    """What passes have in common that one graph can run."""

    num_tokens: int  # with padding
    continues: bool  # the chunk sees keys that were read before


def kinds_up_to(num_tokens: int) -> list[PassKind]:
    """Return the kinds for chunks of so many tokens at most, the largest first."""
    lengths = [one for one in LENGTHS if one == LENGTHS[0] or one < 2 * num_tokens]
    return [PassKind(one, continues) for one in reversed(lengths) for continues in (True, False)]


def kind_of(chunks: Sequence[Chunk], pools: Sequence[PagePool]) -> PassKind | None:
    """Return the kind of a pass; None if it is not a single chunk that fits."""
    if len(chunks) != 1 or not chunks[0].wants_logits:
        return None
    [chunk] = chunks
    length = next((one for one in LENGTHS if len(chunk.tokens) <= one), None)
    if length is None or any(_before(chunk, p) > _room(p) for p in pools):
        return None
    return PassKind(length, continues=chunk.start > 0)


def pack(kind: PassKind, chunk: Chunk, pools: Sequence[PagePool]) -> Tensor:
    """Return the input of a pass over a chunk, on the host."""
    count, length, end = len(chunk.tokens), kind.num_tokens, chunk.start + len(chunk.tokens)
    scratch = np.arange(length) % pools[0].page_size  # places of padding
    columns = np.zeros((3 + len(pools), length), np.int64)
    columns[0, :count] = chunk.tokens
    columns[1, :count] = (chunk.prev_token, *chunk.tokens[:-1])
    columns[2, :count] = np.arange(chunk.start, end)
    columns[3:] = scratch
    for row, pool in zip(columns[3:], pools, strict=True):
        row[:count] = pool.places(chunk.slot, chunk.start, end)
    parts = [columns.reshape(-1), [count - 1]]
    if kind.continues:
        for pool in pools:
            before = _before(chunk, pool)
            places = np.zeros(_room(pool) + length, np.int64)
            places[: before + count] = pool.places(chunk.slot, chunk.start - before, end)
            parts += [[before], places]
    return torch.from_numpy(np.concatenate(parts))


def padding(kind: PassKind, pools: Sequence[PagePool], device: torch.device) -> Tensor:
    """Return the input of a pass that is padding, on the device: it writes to scratch pages."""
    return torch.zeros(sum(_sizes(kind, pools)), dtype=torch.int64, device=device)


def unpack(
    kind: PassKind, packed: Tensor, pools: Sequence[PagePool]
) -> tuple[Tensor, Sequences, Tensor]:
    """Return the columns of `TorchRunner.prefill`, (3 + G, N), the chunk as a sequence, and the
    index of its last token (1,)."""
    length = kind.num_tokens
    columns, wanted, *rest = packed.split(_sizes(kind, pools))
    # Padding is a part of the sequence: its last query stands at the last key of padding.
    ends = torch.arange(0, length + 1, length, dtype=torch.int32, device=packed.device)
    keys = [Keys(None, ends, length)] * len(pools)
    if kind.continues:
        after = (ends > 0).to(torch.int32)
        keys = [
            Keys(places, ends + after * before.to(torch.int32), len(places))
            for before, places in zip(rest[::2], rest[1::2], strict=True)
        ]
    return columns.view(-1, length), Sequences(ends, length, keys), wanted


def _sizes(kind: PassKind, pools: Sequence[PagePool]) -> list[int]:
    """Return the lengths of an input's parts."""
    sizes = [(3 + len(pools)) * kind.num_tokens, 1]
    if kind.continues:
        for pool in pools:
            sizes += [1, _room(pool) + kind.num_tokens]
    return sizes


def _before(chunk: Chunk, pool: PagePool) -> int:
    """Return the number of keys before a chunk that its first query sees."""
    return min(chunk.start, pool.group.window)


def _room(pool: PagePool) -> int:
    return min(pool.group.window, pool.table.shape[1] * pool.page_size, MAX_BEFORE)
