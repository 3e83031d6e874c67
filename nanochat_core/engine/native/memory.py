"""Memory of the native runner, on large pages if the system has them.

Weights are read from end to end at each step. On pages of 4 KB the processor's prefetcher stops at
every page boundary and each page costs a TLB miss; this asks for pages of 2 MB.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and a vector of the kernels
BLOCK = 2**26  # bytes; pages that are never written to take no memory


class Arena:
    """Zeroed tensors side by side in one mapping, which is freed with the last of them."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor like torch.zeros, aligned to 64 bytes."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self._block is None or self._used + size > len(self._block):
            # MAP_PRIVATE: Python's default is shared, for which large pages are often disabled.
            self._block = mmap.mmap(
                -1, max(BLOCK, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel that was built without large pages
                    self._block.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        found = torch.frombuffer(self._block, dtype=dtype, count=count, offset=self._used)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return found.view(*shape)
