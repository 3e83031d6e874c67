"""What decoding keeps of the tokens already read: keys, values, lengths, and the last token.

Rows are independent: each has its own length, so prompts of different lengths share a batch.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.model.shape import head_dim


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where the new tokens of one decode call stand in their rows."""

    positions: Tensor  # (B, T) int64; padding repeats the row's last position
    slots: Tensor  # (B, T) int64: where keys and values are written; padding goes to the spare slot
    length: int  # of the longest row once the new tokens are in
    last: Tensor  # (B,) int64: the row's last new token, as an index into T


class KVCache:
    """Keys and values of `num_rows` rows of up to `max_len` tokens.

    keys, values: (layers, B, K, max_len + 1, D); the last slot takes what padding writes.
    lengths (B,) int64: tokens read so far. previous (B,) int64: each row's last token, which smear
    needs; meaningless where the length is 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.config = config
        self.max_len = max_len
        # Zeros, not empty: a masked key still meets the softmax, and 0 * nan is nan.
        shape = (config.depth, num_rows, config.num_kv_heads, max_len + 1, head_dim(config))
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.previous = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @property
    def num_rows(self) -> int:
        """Rows in the cache."""
        return self.lengths.size(0)

    def reset(self) -> None:
        """Forget every row; the memory is used again."""
        self.lengths.zero_()

    def repeat(self, num_copies: int) -> Self:
        """A new cache in which every row stands `num_copies` times, copies side by side."""
        rows = torch.arange(self.num_rows, device=self.lengths.device)
        return self._rows(rows.repeat_interleave(num_copies))

    def keep(self, rows: Tensor) -> Self:
        """A new cache of these rows in this order: rows (n,) int64."""
        return self._rows(rows)

    def span(self, counts: Tensor, num_new: int) -> Span:
        """Where `counts` (B,) of `num_new` (T) right-padded new tokens go."""
        length = int((self.lengths + counts).max())
        assert length <= self.max_len, f"{length} tokens do not fit a cache of {self.max_len}"
        steps = torch.arange(num_new, device=counts.device)
        last = (counts - 1).clamp(min=0)
        positions = self.lengths.unsqueeze(1) + torch.minimum(steps, last.unsqueeze(1))
        slots = torch.where(steps < counts.unsqueeze(1), positions, self.max_len)
        return Span(positions=positions, slots=slots, length=length, last=last)

    def write(self, layer: int, k: Tensor, v: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Store k and v (B, T, K, D) of one layer; returns all keys and values (B, K, S, D)."""
        rows = torch.arange(self.num_rows, device=k.device).unsqueeze(1)
        self.keys[layer, rows, :, span.slots] = k
        self.values[layer, rows, :, span.slots] = v
        return self.keys[layer, :, :, : span.length], self.values[layer, :, :, : span.length]

    def advance(self, tokens: Tensor, counts: Tensor, span: Span) -> None:
        """Count the new tokens (B, T) as read, after every layer has written them."""
        last_tokens = tokens.gather(1, span.last.unsqueeze(1)).squeeze(1)
        self.previous = torch.where(counts > 0, last_tokens, self.previous)
        self.lengths = self.lengths + counts

    def _rows(self, rows: Tensor) -> Self:
        new = object.__new__(type(self))
        new.config, new.max_len = self.config, self.max_len
        new.keys, new.values = self.keys[:, rows], self.values[:, rows]
        new.lengths, new.previous = self.lengths[rows], self.previous[rows]
        return new
