"""Memory of the native runner: large pages, where the system has them.

Weights are read from end to end at each step. On pages of 4 KB the processor's prefetching stops
at every one of them and each costs a look into the page table; pages of 2 MB are asked for here.
"""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and a vector of the kernels
BLOCK = 2**26  # bytes; what is never written to costs an address only


class Arena:
    """Zeroed tensors that live side by side; their memory goes when the last of them does."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As torch.zeros, aligned to 64 bytes."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self._block is None or self._used + size > len(self._block):
            # Private, for large pages are not for shared memory everywhere.
            self._block = mmap.mmap(
                -1, max(BLOCK, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._block.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        found = torch.frombuffer(self._block, dtype=dtype, count=count, offset=self._used)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return found.view(*shape)
