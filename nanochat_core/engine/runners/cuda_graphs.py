"""Decode steps as CUDA graphs: one launch a step, and the host a step ahead of the device.

A graph is captured for each kind of step (see device_runner.py), for 1, 2, 4, 8, ... rows; those
of plain draws at construction, the largest first, others when they are first wanted; all share one
memory pool. What steps tell goes to pinned memory behind an event, which `Launched.read` waits for.

Attention is FlashAttention's over paged memory where its package is there (3, then 2), else torch's
SDPA, with graphs for 1, 2, 4, 8, ... pages of length.

No GPU has run this yet; it is written to the documented interfaces, and the steps themselves are
tested on CPUs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanochat_core.engine.runner import PageGroup
from nanochat_core.engine.runners.device_runner import (
    Attend,
    DeviceRunner,
    Kind,
    Launched,
    StepTokens,
)
from nanochat_core.model.gpt import GPT

WARM_UPS = 2  # runs before a capture, in which libraries choose their kernels


class Graph:
    """A captured step, the memory it reads its rows from and the memory it tells in."""

    def __init__(self, graph: torch.cuda.CUDAGraph, rows: Tensor, told: StepTokens) -> None:
        self.graph, self.rows, self.told = graph, rows, told


class GraphRunner(DeviceRunner):
    """Runs `model` on a GPU, see runner.py and device_runner.py."""

    is_asynchronous = True

    def __init__(
        self,
        model: GPT,
        *,
        dtype: torch.dtype,
        groups: Sequence[PageGroup],
        page_size: int,
        num_slots: int,
        max_len: int,
        park_tokens: Iterable[int],
    ) -> None:
        super().__init__(
            model,
            dtype=dtype,
            groups=groups,
            page_size=page_size,
            num_slots=num_slots,
            max_len=max_len,
            park_tokens=park_tokens,
        )
        paged = find_paged_attention(self) if dtype == torch.bfloat16 else None
        self.attention = "sdpa" if paged is None else paged[0]
        if paged is not None:
            self.attend = paged[1]
        self.graphs: dict[Kind, Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        for count in sorted({bucket_of(n, num_slots) for n in range(1, num_slots + 1)})[::-1]:
            self._graph(self._paged(self.kind_of([], [max_len], num_rows=count)))

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Launched:
        """See runner.py."""
        count = bucket_of(len(slots), self.num_slots)
        spare = [self.num_slots] * (count - len(slots))
        graph = self._graph(self._paged(self.kind_of(slots, limits, num_rows=count)))
        rows = self._send([*slots, *spare])
        self.state.limit[rows] = self._send([*limits, *(0 for _ in spare)])
        graph.rows.copy_(rows)
        told: list[StepTokens] = []
        for _ in range(num_steps):
            graph.graph.replay()
            told.append(_to_host(graph.told))
        event = torch.cuda.Event()
        event.record()
        return Launched(told, self._wants(slots), event.synchronize)

    def _send(self, values: Sequence[int]) -> Tensor:
        """To the device, without waiting for it."""
        return torch.tensor(values).pin_memory().to(self.device, non_blocking=True)

    def _paged(self, kind: Kind) -> Kind:
        """Without a length where attention has no use for it."""
        if self.attention == "sdpa":
            return kind
        return Kind(
            num_rows=kind.num_rows,
            num_pages=0,
            all_candidates=kind.all_candidates,
            tells=kind.tells,
        )

    def _graph(self, kind: Kind) -> Graph:
        found = self.graphs.get(kind)
        if found is None:
            found = self.graphs[kind] = self._capture(kind)
        return found

    @torch.inference_mode()
    def _capture(self, kind: Kind) -> Graph:
        """The step over parked rows: it runs, and changes nothing."""
        rows = torch.full((kind.num_rows,), self.num_slots, device=self.device)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self.step(kind, rows)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            told = self.step(kind, rows)
        return Graph(graph, rows, told)


def bucket_of(count: int, most: int) -> int:
    """Rows of the smallest graph for `count` of them: a power of two, or `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


def find_paged_attention(runner: DeviceRunner) -> tuple[str, Attend] | None:
    """FlashAttention over the runner's pages, and its name; None where there is none."""
    try:
        # Not by way of packages that download it: who serves reaches no network.
        from flash_attn_interface import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,  # pyright: ignore[reportUnknownVariableType]
        )

        return "fa3", _paged_call(runner, flash_attn_with_kvcache, "page_table")
    except ImportError:
        pass
    try:
        from flash_attn import (  # pyright: ignore[reportMissingImports]
            flash_attn_with_kvcache,  # pyright: ignore[reportUnknownVariableType]
        )

        return "fa2", _paged_call(runner, flash_attn_with_kvcache, "block_table")
    except ImportError:
        return None


def _paged_call(runner: DeviceRunner, attention: Callable[..., Any], table_name: str) -> Attend:
    """FlashAttention's call; a window counts keys to the left, the query's own excluded."""

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
            window_size=(window, 0) if window < runner.max_len - 1 else (-1, -1),
            **{table_name: table},
        )
        # Some versions give the log-sum-exp along with the output.
        return (result[0] if isinstance(result, tuple) else result).squeeze(1)

    return attend


def _to_host(told: StepTokens) -> StepTokens:
    """Copies in pinned memory, under way; the next replay writes where the originals are."""

    def copy(tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    return StepTokens(
        tokens=copy(told.tokens),
        chosen=copy(told.chosen),
        ids=copy(told.ids),
        values=copy(told.values),
    )
