"""Passes of a runner as CUDA graphs: one launch for each, and the host ahead of the device.

A graph is captured for each kind of pass (see device_state.py), on first use; all share one memory
pool. The output of decode steps is copied to pinned memory behind an event, which the host waits
for.
"""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from nanochat_core.engine.runners.device_state import StepOutput

WARM_UPS = 2  # runs before a capture, in which libraries choose their kernels

K = TypeVar("K")  # a kind of pass
T = TypeVar("T")  # a pass's output: tensors


class Graph(NamedTuple):
    """A captured pass, the memory it reads its input from and the memory of its output."""

    graph: torch.cuda.CUDAGraph
    given: Tensor
    output: Any


class Graphs(Generic[K, T]):
    """The graphs of one runner's passes of one sort."""

    def __init__(
        self,
        run: Callable[[K, Tensor], T],
        idle: Callable[[K], Tensor],
        *,
        device: torch.device,
        memory: Any,
    ) -> None:
        """run: what is captured, a pass over an input. idle: an input on the device with which a
        pass changes nothing. memory: the pool, of `torch.cuda.graph_pool_handle`."""
        self.captured: dict[K, Graph] = {}
        self._run, self._idle, self._device, self._memory = run, idle, device, memory

    def replay(self, kind: K, given: Tensor, count: int = 1) -> Iterator[T]:
        """Launch `count` passes over an input; yield the output of each.

        Copy the output before the next: another pass, of any kind, overwrites it.
        """
        graph = self.find(kind)
        # Copied, because the graph reads from the address that it captured.
        graph.given.copy_(given, non_blocking=True)
        for _ in range(count):
            graph.graph.replay()
            yield graph.output

    def find(self, kind: K) -> Graph:
        """Return the graph of a kind of pass, captured now if it is the first of its kind."""
        found = self.captured.get(kind)
        if found is None:
            found = self.captured[kind] = self._capture(kind)
        return found

    @torch.inference_mode()
    def _capture(self, kind: K) -> Graph:
        given = self._idle(kind)
        # A capture must not be the first run, and warm-ups belong on a side stream: torch's rules
        # for CUDA graphs.
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._run(kind, given)
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread, that writes a checkpoint say, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = self._run(kind, given)
        return Graph(graph, given, output)


def bucket_of(count: int, most: int) -> int:
    """Return the rows of the smallest graph for `count` of them: a power of two, or `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


def to_host(output: StepOutput) -> StepOutput:
    """Start copies to pinned memory; the next replay overwrites the originals."""

    def copy(tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    return StepOutput(*map(copy, output))
