"""Decode steps as CUDA graphs: one launch per step, and the host a step ahead of the device.

A graph is captured for each kind of step (see device_runner.py), for 1, 2, 4, 8, ... rows; those
of plain sampling at construction, others on first use; all share one memory pool. The steps' output
is copied to pinned memory behind an event, which `Pending` waits for.

Attention is FlashAttention's over paged memory if its package is installed (3, then 2), else
torch's SDPA, with graphs for 1, 2, 4, 8, ... pages of length.

No GPU has run this yet; it is written to the documented interfaces, and the steps themselves are
tested on CPUs.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_core.engine.runner import Capacity, DecodeOutput, Pending
from nanochat_core.engine.runners.device_runner import (
    Attend,
    DeviceRunner,
    Kind,
    StepOutput,
    read_output,
)
from nanochat_core.model.gpt import GPT

WARM_UPS = 2  # runs before a capture, in which libraries choose their kernels


class Graph(NamedTuple):
    """A captured step, the memory it reads its rows from and the memory of its output."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor
    output: StepOutput


class GraphRunner(DeviceRunner):
    """Runs `model` on a GPU, see runner.py and device_runner.py."""

    is_asynchronous = True

    def __init__(
        self, model: GPT, capacity: Capacity, *, dtype: torch.dtype, stop_tokens: Iterable[int]
    ) -> None:
        super().__init__(model, capacity, dtype=dtype, stop_tokens=stop_tokens)
        paged = find_paged_attention(self) if dtype == torch.bfloat16 else None
        self.attention = "sdpa" if paged is None else paged[0]
        if paged is not None:
            self.attend = paged[1]
        self.graphs: dict[Kind, Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        # The largest first: the smaller graphs then reuse its blocks of the shared pool.
        counts = {bucket_of(n, self.num_slots) for n in range(1, self.num_slots + 1)}
        for count in sorted(counts, reverse=True):
            self._graph(self._paged(self.kind_of([], [self.max_len], num_rows=count)))

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """See runner.py."""
        # A graph has a fixed number of rows. Spare ones are those of the slot that is always
        # stopped, see `State`: they are computed and change nothing.
        count = bucket_of(len(slots), self.num_slots)
        spare = [self.num_slots] * (count - len(slots))
        graph = self._graph(self._paged(self.kind_of(slots, limits, num_rows=count)))
        rows = self._send([*slots, *spare])
        self.state.limit[rows] = self._send([*limits, *(0 for _ in spare)])
        # Copied, because the graph reads from the address that it captured.
        graph.rows.copy_(rows)
        outputs: list[StepOutput] = []
        for _ in range(num_steps):
            graph.graph.replay()
            outputs.append(_to_host(graph.output))
        # After the copies, on the same stream: once it has passed, the host may read them.
        event = torch.cuda.Event()
        event.record()
        wants = self._wants(slots)

        def read() -> DecodeOutput:
            event.synchronize()
            return read_output(outputs, wants)

        return read

    def _send(self, values: Sequence[int]) -> Tensor:
        """Copy to the device without waiting for it."""
        # Pinned, because a copy from pageable memory would block the host.
        return torch.tensor(values).pin_memory().to(self.device, non_blocking=True)

    def _paged(self, kind: Kind) -> Kind:
        """Return the kind without a length, if attention works for any: fewer graphs."""
        return kind if self.attention == "sdpa" else replace(kind, num_pages=0)

    def _graph(self, kind: Kind) -> Graph:
        found = self.graphs.get(kind)
        if found is None:
            found = self.graphs[kind] = self._capture(kind)
        return found

    @torch.inference_mode()
    def _capture(self, kind: Kind) -> Graph:
        """Capture a step. Its rows are stopped, so that running it changes no slot."""
        rows = torch.full((kind.num_rows,), self.num_slots, device=self.device)
        # A capture must not be the first run, and warm-ups belong on a side stream: torch's rules
        # for CUDA graphs.
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self.step(kind, rows)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = self.step(kind, rows)
        return Graph(graph, rows, output)


def bucket_of(count: int, most: int) -> int:
    """Return the rows of the smallest graph for `count` of them: a power of two, or `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


def find_paged_attention(runner: DeviceRunner) -> tuple[str, Attend] | None:
    """Return FlashAttention's name and its call over the runner's pages; None if not installed."""
    # Not from packages that download kernels: a server may have no network. Written-out imports,
    # which a stage's fingerprint can follow.
    with suppress(ImportError):
        import flash_attn_interface as fa3  # pyright: ignore[reportMissingImports]

        return "fa3", _paged_call(runner, fa3.flash_attn_with_kvcache, "page_table")
    with suppress(ImportError):
        import flash_attn as fa2  # pyright: ignore[reportMissingImports]

        return "fa2", _paged_call(runner, fa2.flash_attn_with_kvcache, "block_table")
    return None


def _paged_call(runner: DeviceRunner, attention: Callable[..., Any], table_name: str) -> Attend:
    """Return FlashAttention's call as an `Attend`."""

    def attend(group: int, layer: int, q: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        pool = runner.pools[group]
        at, window = pool.place[layer], pool.group.window
        result = attention(
            q.unsqueeze(1),
            pool.keys[at],
            pool.values[at],
            cache_seqlens=(positions + 1).int(),
            softmax_scale=runner.weights.softmax_scale,
            causal=True,
            # As ours, a window counts keys to the left without the query's own; -1: no limit.
            window_size=(window, 0) if window < runner.max_len - 1 else (-1, -1),
            **{table_name: table},
        )
        # Some versions return the log-sum-exp along with the output.
        return (result[0] if isinstance(result, tuple) else result).squeeze(1)

    return attend


def _to_host(output: StepOutput) -> StepOutput:
    """Start copies to pinned memory; the next replay overwrites the originals."""

    def copy(tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    return StepOutput(*map(copy, output))
