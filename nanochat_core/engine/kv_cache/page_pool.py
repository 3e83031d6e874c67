"""The torch runners' KV cache memory, in pages, and each slot's page table.

Shapes: P pages of S tokens, L layers of a group, K key/value heads, D head dim.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanochat_core.engine.runner import Capacity, PageGroup


class PagePool:
    """Keys and values of one group, (L, P, S, K, D) each, and a table of pages per slot.

    If a slot's pages are contiguous in memory, its keys are a view; else they are gathered for the
    pass.
    """

    def __init__(
        self,
        group: PageGroup,
        capacity: Capacity,
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.group, self.page_size = group, capacity.page_size
        shape = (len(group.layers), group.num_pages, self.page_size, num_kv_heads, head_dim)
        # Zeros, not empty: a masked key still meets the softmax, and 0 * nan is nan.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.place = {layer: i for i, layer in enumerate(group.layers)}
        width = -(-capacity.max_len // self.page_size)
        self.table = np.zeros((capacity.num_slots, width), dtype=np.int64)
        # _run[slot, i]: the first entry from which the pages up to entry i are contiguous.
        self._run = np.tile(np.arange(width), (capacity.num_slots, 1))

    def set_table(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set entries `first` and on of the slot's table."""
        row, run = self.table[slot], self._run[slot]
        assert first + len(pages) <= len(row), f"entries {first}+{len(pages)} of {len(row)}"
        row[first : first + len(pages)] = pages
        # Runs of later entries may begin in the ones just set; scratch ends the table in use.
        for i in range(first, len(row)):
            if i >= first + len(pages) and not row[i]:
                break
            follows = i > 0 and row[i] == row[i - 1] + 1 and row[i - 1] != 0
            run[i] = run[i - 1] if follows else i

    def clear_table(self, slot: int) -> None:
        """Set all of the slot's entries to the scratch page."""
        self.table[slot] = 0
        self._run[slot] = np.arange(self.table.shape[1])

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers of a page."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def places(self, slot: int, first: int, last: int) -> np.ndarray:
        """Return the indices into (P * S) of positions `first` to `last - 1`: (last - first,)."""
        positions = np.arange(first, last)
        pages = self.table[slot, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v (N, K, D) at `places` (N,) of a layer."""
        at = self.place[layer]
        self.keys[at].flatten(0, 1).index_copy_(0, places, k.to(self.keys.dtype))
        self.values[at].flatten(0, 1).index_copy_(0, places, v.to(self.values.dtype))

    def gather(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values at `places` (N,): (N, K, D) each."""
        at = self.place[layer]
        keys, values = (pool[at].flatten(0, 1) for pool in (self.keys, self.values))
        return keys.index_select(0, places), values.index_select(0, places)

    def find(self, slot: int, first: int, last: int) -> "PageRange":
        """Return positions `first` to `last - 1` of a slot as a range, for `read`."""
        size = self.page_size
        low, high = first // size, (last - 1) // size
        # Contiguous: a range of the whole pool, without a copy.
        if self._run[slot, high] <= low:
            return PageRange(int(self.table[slot, low]) * size + first % size, last - first, None)
        pages = torch.from_numpy(self.table[slot, low : high + 1].copy())
        return PageRange(first % size, last - first, pages.to(self.keys.device))

    def read(self, layer: int, page_range: "PageRange") -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values in the range, (1, K, T, D) each."""
        at = self.place[layer]
        found: list[Tensor] = []
        for pool in (self.keys[at], self.values[at]):
            memory = pool if page_range.pages is None else pool.index_select(0, page_range.pages)
            part = memory.flatten(0, 1)[page_range.offset : page_range.offset + page_range.length]
            found.append(part.transpose(0, 1).unsqueeze(0))
        return found[0], found[1]


class PageRange:
    """Consecutive positions of a slot: `length` tokens from `offset` on, in the whole pool if
    `pages` is None, else in those pages once they are gathered."""

    def __init__(self, offset: int, length: int, pages: Tensor | None) -> None:
        self.offset, self.length, self.pages = offset, length, pages
