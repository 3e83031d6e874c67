"""Decode steps as CUDA graphs: one launch per step, and the host a step ahead of the device.

A graph is captured for each kind of step (see device_state.py), on first use; all share one memory
pool. The steps' output is copied to pinned memory behind an event, which the host waits for.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nanochat_core.engine.runners.device_state import Kind, StepOutput

WARM_UPS = 2  # runs before a capture, in which libraries choose their kernels

# (kind, slots (B,)): run one step of the slots.
StepFn: TypeAlias = Callable[[Kind, Tensor], StepOutput]


class Graph(NamedTuple):
    """A captured step, the memory it reads its rows from and the memory of its output."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    output: StepOutput


class StepGraphs:
    """The graphs of one runner's steps."""

    def __init__(self, step: StepFn, *, spare_slot: int, device: torch.device) -> None:
        """spare_slot: one that is always stopped: running a step with it changes nothing."""
        self.captured: dict[Kind, Graph] = {}
        self._step, self._spare_slot, self._device = step, spare_slot, device
        self._memory = torch.cuda.graph_pool_handle()

    def replay(
        self, kind: Kind, rows: Tensor, num_steps: int
    ) -> tuple[list[StepOutput], Callable[[], None]]:
        """Launch steps of the slots `rows` (B,). Returns their output, in pinned memory, and a
        function that waits until it is there."""
        graph = self.find(kind)
        # Copied, because the graph reads from the address that it captured.
        graph.rows.copy_(rows)
        outputs: list[StepOutput] = []
        for _ in range(num_steps):
            graph.graph.replay()
            outputs.append(_to_host(graph.output))
        # After the copies, on the same stream: once it has passed, the host may read them.
        event = torch.cuda.Event()
        event.record()
        return outputs, event.synchronize

    def find(self, kind: Kind) -> Graph:
        """Return the graph of a kind of step, captured now if it is the first of its kind."""
        found = self.captured.get(kind)
        if found is None:
            found = self.captured[kind] = self._capture(kind)
        return found

    @torch.inference_mode()
    def _capture(self, kind: Kind) -> Graph:
        rows = torch.full((kind.num_rows,), self._spare_slot, device=self._device)
        # A capture must not be the first run, and warm-ups belong on a side stream: torch's rules
        # for CUDA graphs.
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._step(kind, rows)
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread, that writes a checkpoint say, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = self._step(kind, rows)
        return Graph(graph, rows, output)


def bucket_of(count: int, most: int) -> int:
    """Return the rows of the smallest graph for `count` of them: a power of two, or `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


def _to_host(output: StepOutput) -> StepOutput:
    """Start copies to pinned memory; the next replay overwrites the originals."""

    def copy(tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    return StepOutput(*map(copy, output))
