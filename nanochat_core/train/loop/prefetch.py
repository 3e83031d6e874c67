"""Put the rows of each step on the device before the step needs them.

A thread takes the next step's rows while this one computes. For a GPU it copies them into one of
two pinned buffers; the copy to the device runs on a stream of its own, and the ids travel as they
are stored (u16 or u32) and are widened there. Nothing about it has to be saved: a step's rows
follow from its number.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanochat_core.runtime.hardware.device import use_device

# step -> arrays of one length; ids are u16, u32 or int64
Take: TypeAlias = Callable[[int], tuple[npt.NDArray[Any], ...]]


def prefetch(
    take: Take, *, start: int, stop: int, device: torch.device
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """Yield (step, the arrays of `take(step)` as int64 tensors on `device`).

    The steps are `start` up to but without `stop`. Raises what `take` raised for a step when that
    step is due.
    """
    lanes = [_Lane(device), _Lane(device)]
    with ThreadPoolExecutor(1, "feed", initializer=use_device, initargs=(device,)) as thread:
        following = thread.submit(lanes[start % 2].load, take, start)
        for step in range(start, stop):
            following.result()
            # The lane not in use is filled before the step is yielded, so that both run at once.
            lane = lanes[step % 2]
            if step + 1 < stop:
                following = thread.submit(lanes[(step + 1) % 2].load, take, step + 1)
            yield step, lane.tensors()


class _Lane:
    """A buffer for one step's rows. There are two, so that one fills while the other is used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned: list[Tensor] = []
        self._narrow: list[Tensor] = []  # as stored, on the device
        self._copied: torch.cuda.Event | None = None

    def load(self, take: Take, step: int) -> None:
        """Take a step's rows and start to copy them to the device. Runs in the thread."""
        arrays = [_signed(array) for array in take(step)]
        if self._stream is None:
            self._narrow = [torch.from_numpy(array) for array in arrays]
            return
        if self._copied is not None:
            self._copied.synchronize()  # the pinned buffers are free again
        with torch.cuda.stream(self._stream):
            self._pinned = [self._pin(i, array) for i, array in enumerate(arrays)]
            self._narrow = [t.to(self._device, non_blocking=True) for t in self._pinned]
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the rows as int64 tensors, ready for what the current stream does next."""
        if self._stream is not None:
            assert self._copied is not None
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            # They were allocated on the other stream: without this the caching allocator may hand
            # out their memory before the current stream has read them.
            for tensor in self._narrow:
                tensor.record_stream(current)
        return tuple(widen(tensor) for tensor in self._narrow)

    def _pin(self, i: int, array: npt.NDArray[Any]) -> Tensor:
        """Return the array in pinned memory, in the last step's buffer if it has the same shape."""
        source = torch.from_numpy(array)
        if i >= len(self._pinned) or self._pinned[i].shape != source.shape:
            return source.pin_memory()
        return self._pinned[i].copy_(source)


def widen(ids: Tensor) -> Tensor:
    """Return ids as int64: of int16 and int32 the bits are those of u16 and u32."""
    # Sign extension sets the upper bits of ids from 2**15 (2**31) on; the mask clears them.
    masks = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}
    wide = ids.to(torch.int64)
    return wide & masks[ids.dtype] if ids.dtype in masks else wide


def _signed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View u16 and u32 as the signed dtype of their width, which torch supports everywhere."""
    signed = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32}
    array = np.ascontiguousarray(array)
    return array.view(signed[array.dtype]) if array.dtype in signed else array
