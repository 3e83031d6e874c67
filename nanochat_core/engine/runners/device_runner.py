"""The runner in plain torch with every slot's state on the device: the host only names the slots.

A step reads and writes its rows' state and outputs the sampled tokens without waiting for the host:
the next one may be launched before this one is done. Stopped rows are computed too and change
nothing. Steps run one operation after the other, which works on a CPU too and is tested there, or
as CUDA graphs (cuda_graphs.py), in torch or as the kernels of decode_kernels.py. A prefill pass of
one chunk is a graph too, where one can be captured (prefill_graphs.py).

Shapes: B rows of a step, W pages that are looked at, S tokens of a page, T = W * S keys, H query
heads, K key/value heads, D head dim, V vocabulary.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.requests import MAX_LOG_PROBS, SamplingParams
from nanochat_core.engine.runner import Capacity, Chunk, DecodeOutput, Pending
from nanochat_core.engine.runners.cuda_graphs import Graphs, bucket_of, to_host
from nanochat_core.engine.runners.device_state import (
    Kind,
    State,
    StepOutput,
    read_output,
)
from nanochat_core.engine.runners.forward import forward
from nanochat_core.engine.runners.paged_attention import Attend, find_paged_attention
from nanochat_core.engine.runners.prefill_attention import attend_together
from nanochat_core.engine.runners.prefill_graphs import (
    PassKind,
    kind_of,
    kinds_up_to,
    pack,
    padding,
    unpack,
)
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import candidates_of, cap, log_probs, row_of, sample_rows
from nanochat_core.model.attention_backends import mixed
from nanochat_core.model.gpt import GPT

_LOG = logging.getLogger(__name__)

MAX_CANDIDATES = 256  # a larger top_k, and what needs the whole vocabulary, takes a slower step


class DeviceRunner(TorchRunner):
    """Runs `model`, see runner.py and torch_runner.py."""

    def __init__(
        self,
        model: GPT,
        capacity: Capacity,
        *,
        dtype: torch.dtype,
        stop_tokens: Iterable[int],
        graphs: bool = False,
        kernels: bool = False,
    ) -> None:
        """Allocate pages and state. graphs: steps are CUDA graphs, those of plain sampling and all
        of prefill captured here. kernels: steps are Triton kernels."""
        super().__init__(model, capacity, dtype=dtype, stop_tokens=stop_tokens, plain=kernels)
        self.state = State(self.num_slots, self.vocab_size, self.device)
        self._stops = self._tensor(sorted(self.stop_tokens) or [-2])
        shape = (self.num_slots + 1, self.pools[0].table.shape[1])
        self.tables = [
            torch.zeros(shape, dtype=torch.int32, device=self.device) for _ in self.pools
        ]
        self.attend: Attend = self._attend
        self.attention = "sdpa"
        self.kernels = None
        if kernels:
            # Triton is imported where it is wanted: torch's builds for CPUs come without it.
            from nanochat_core.engine.runners.decode_kernels import DecodeKernels, Target

            self.kernels = DecodeKernels(
                self.weights,
                self.pools,
                self.tables,
                self.state,
                stop_tokens=self._stops,
                num_candidates=min(MAX_CANDIDATES, self.vocab_size),
                max_len=self.max_len,
                max_rows=self.num_slots,
                target=Target.of(self.device),
            )
        self.graphs: Graphs[Kind, StepOutput] | None = None
        self.passes: Graphs[PassKind, Tensor] | None = None
        if graphs:
            self.is_asynchronous = True
            if dtype == torch.bfloat16 and (paged := find_paged_attention(self)) is not None:
                self.attention, self.attend = paged
            memory = torch.cuda.graph_pool_handle()
            # Before the steps, which are smaller: those reuse their blocks of the shared pool.
            self.passes = self._capture_passes(memory)
            self.graphs = Graphs(self.step, self._idle, device=self.device, memory=memory)
            # The largest first: the smaller graphs then reuse its blocks of the shared pool.
            counts = {bucket_of(n, self.num_slots) for n in range(1, self.num_slots + 1)}
            for count in sorted(counts, reverse=True):
                self.graphs.find(self.kind_of([], [self.max_len], num_rows=count))

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """See runner.py."""
        super().set_table(group, slot, first, pages)
        # In both tables: prefill reads the host's, decode steps read the device's.
        entries = torch.tensor(pages, dtype=torch.int32)
        self.tables[group][slot, first : first + len(pages)] = entries.to(self.device)

    def clear_table(self, slot: int) -> None:
        """See runner.py."""
        super().clear_table(slot)
        for table in self.tables:
            table[slot] = 0

    @torch.inference_mode()
    def start(
        self, slot: int, params: SamplingParams, *, key: int, num_log_probs: int | None
    ) -> None:
        """See runner.py."""
        assert (num_log_probs or 0) <= MAX_LOG_PROBS, f"{num_log_probs} alternatives"
        super().start(slot, params, key=key, num_log_probs=num_log_probs)
        self.state.stopped[slot] = True
        self.state.key[slot] = key
        values = row_of(params, self.vocab_size)
        for column, value in zip(self.state.params, values, strict=True):
            column[slot] = value

    @torch.inference_mode()
    def sample_first(
        self,
        slots: Sequence[int],
        logits: Tensor,
        lengths: Sequence[int],
        prev_tokens: Sequence[int],
    ) -> DecodeOutput:
        """See runner.py."""
        output = super().sample_first(slots, logits, lengths, prev_tokens)
        rows, at = self._tensor(slots), list(slots)
        for name in ("length", "prev_token", "token", "stopped"):
            column: Tensor = getattr(self.state, name)
            column[rows] = torch.from_numpy(getattr(self, name)[at]).to(column)
        return output

    def _capture_passes(self, memory: Any) -> Graphs[PassKind, Tensor] | None:
        """Return graphs of all kinds of prefill passes; None if they cannot be had."""
        if self._varlen is None:  # attention is chunk by chunk, of lengths that the host must know
            return None
        idle = partial(padding, pools=self.pools, device=self.device)
        passes = Graphs(self.read_packed, idle, device=self.device, memory=memory)
        try:
            for kind in kinds_up_to(min(self.max_len, self.prefill_tokens)):
                passes.find(kind)
        except RuntimeError as error:  # torch's for what CUDA refuses, and for a lack of memory
            first = str(error).partition("\n")[0]
            _LOG.warning("prompts are read without CUDA graphs: %s", first)
            return None
        return passes

    def _read(self, chunks: Sequence[Chunk]) -> Tensor:
        kind = kind_of(chunks, self.pools)
        if self.passes is None or kind is None:
            return super()._read(chunks)
        # Pinned, because a copy from pageable memory would block the host.
        packed = pack(kind, chunks[0], self.pools).pin_memory()
        [logits] = (output.clone() for output in self.passes.replay(kind, packed))
        return logits

    def read_packed(self, kind: PassKind, packed: Tensor) -> Tensor:
        """Run a prefill pass over the input that `pack` makes: logits (1, V), capped."""
        assert self._varlen is not None
        columns, sequences, wanted = unpack(kind, packed, self.pools)
        last, scale = self.weights.config.depth - 1, self.weights.softmax_scale
        attend = attend_together(
            self._varlen, self.pools, sequences, wanted, last_layer=last, scale=scale
        )
        return self._read_columns(columns, attend, wanted)

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """See runner.py."""
        # A graph has a fixed number of rows. Spare ones are those of the slot that is always
        # stopped, see `State`: they are computed and change nothing.
        count = len(slots) if self.graphs is None else bucket_of(len(slots), self.num_slots)
        spare = count - len(slots)
        kind = self.kind_of(slots, limits, num_rows=count)
        rows = self._send([*slots, *[self.num_slots] * spare])
        self.state.limit[rows] = self._send([*limits, *[0] * spare])
        wants = self._wants(slots)
        if self.graphs is None:
            return partial(read_output, [self.step(kind, rows) for _ in range(num_steps)], wants)
        outputs = [to_host(output) for output in self.graphs.replay(kind, rows, num_steps)]
        # After the copies, on the same stream: once it has passed, the host may read them.
        event = torch.cuda.Event()
        event.record()

        def read() -> DecodeOutput:
            event.synchronize()
            return read_output(outputs, wants)

        return read

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """See runner.py."""
        super().release(slot)
        self.state.stopped[slot] = True

    def kind_of(self, slots: Sequence[int], limits: Sequence[int], *, num_rows: int) -> Kind:
        """Return the kind of step that these slots need."""
        # By the limits and not by the lengths, which only the device knows; rounded up to a power
        # of two, so that there are few kinds and so few graphs.
        pages = -(-max(limits, default=1) // self.page_size)
        pages = min(1 << max(pages - 1, 0).bit_length(), self.pools[0].table.shape[1])
        any_length = self.attention != "sdpa" or self.kernels is not None
        return Kind(
            num_rows=num_rows,
            num_pages=0 if any_length else pages,
            all_candidates=any(self._needs_all(self.sampler.params[slot]) for slot in slots),
            wants_log_probs=any(count is not None for count in self._wants(slots)),
        )

    def _idle(self, kind: Kind) -> Tensor:
        """Return spare rows, with which a step changes nothing."""
        return torch.full((kind.num_rows,), self.num_slots, device=self.device)

    def step(self, kind: Kind, rows: Tensor) -> StepOutput:
        """Run one step of the slots `rows` (B,). Spare rows name the last slot, always stopped."""
        if self.kernels is None:
            return self._sample_step(kind, rows, self._step_logits(kind, rows))
        if kind.all_candidates or kind.wants_log_probs:
            return self._sample_step(kind, rows, self.kernels.forward(rows))
        nothing = self.kernels.logits[:0, 0]
        tokens = self.kernels.step(rows)
        return StepOutput(tokens=tokens, chosen=nothing, ids=nothing.long(), values=nothing)

    def _step_logits(self, kind: Kind, rows: Tensor) -> Tensor:
        """Read the token of each slot: logits (B, V) fp32, capped."""
        state = self.state
        token, prev_token, length = state.token[rows], state.prev_token[rows], state.length[rows]
        continues = self._continues(rows)
        positions = length.clamp(max=self.max_len - 1)
        tables = [table[rows] for table in self.tables]
        entry = (positions // self.page_size)[:, None]
        # Stopped rows write their keys and values into the scratch page, which is page 0.
        places = [
            torch.where(continues, table.gather(1, entry)[:, 0], 0) * self.page_size
            + positions % self.page_size
            for table in tables
        ]

        def attention_fn(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = self._group_of[layer]
            self.pools[group].write(layer, places[group], k, v)
            table = tables[group][:, : kind.num_pages] if kind.num_pages else tables[group]
            return self.attend(group, layer, q, positions, table)

        return cap(forward(self.weights, token, prev_token, positions, attention_fn), self._softcap)

    def _continues(self, rows: Tensor) -> Tensor:
        """Return (B,) bool: false for a slot that is stopped or has no further token to read."""
        state = self.state
        return ~state.stopped[rows] & (state.length[rows] + 1 < state.limit[rows])

    def _sample_step(self, kind: Kind, rows: Tensor, logits: Tensor) -> StepOutput:
        """Sample each slot's next token and advance the slot."""
        state = self.state
        token, prev_token, length = state.token[rows], state.prev_token[rows], state.length[rows]
        continues = self._continues(rows)
        vocab = self.vocab_size
        new = sample_rows(
            logits,
            state.key[rows],
            length + 1,
            state.params.take(rows),
            num_candidates=vocab if kind.all_candidates else min(MAX_CANDIDATES, vocab),
        )
        state.prev_token[rows] = torch.where(continues, token, prev_token)
        state.token[rows] = torch.where(continues, new, token)
        state.length[rows] = length + continues
        # The new token is at position length + 1: with it prompt and answer hold length + 2.
        ends = (new[:, None] == self._stops).any(dim=-1) | (length + 2 >= state.limit[rows])
        state.stopped[rows] = ~continues | ends
        # Empty tensors and not None: all kinds of steps then have outputs of one form.
        nothing = logits[:0, 0]
        chosen, ids, values = (
            log_probs(logits, new, min(MAX_LOG_PROBS, vocab))
            if kind.wants_log_probs
            else (nothing, nothing.long(), nothing)
        )
        return StepOutput(
            tokens=torch.where(continues, new, -1), chosen=chosen, ids=ids, values=values
        )

    def _attend(
        self, group: int, layer: int, q: Tensor, positions: Tensor, table: Tensor
    ) -> Tensor:
        """Compute attention by SDPA over gathered pages, for each row as many as the longest row or
        the window needs."""
        pool: PagePool = self.pools[group]
        size, window = self.page_size, pool.group.window
        count = min(table.size(1), window // size + 2)  # + 2: both ends may be inside a page
        low = (positions - window).clamp(min=0) // size  # (B,): the first page that is seen
        pages = low[:, None] + torch.arange(count, device=q.device)  # (B, W)
        entries = table.gather(1, pages.clamp(max=table.size(1) - 1))
        at = pool.place[layer]
        keys, values = (
            memory[at][entries].flatten(1, 2).transpose(1, 2)  # (B, K, T, D)
            for memory in (pool.keys, pool.values)
        )
        offsets = torch.arange(size, device=q.device)
        distance = positions[:, None, None] - (pages[:, :, None] * size + offsets)  # (B, W, S)
        mask = ((distance >= 0) & (distance <= window)).flatten(1)[:, None, None]  # (B, 1, 1, T)
        # SDPA scales by 1 / sqrt(D).
        q = q * (self.weights.softmax_scale * self.weights.head_dim**0.5)
        return mixed(q.unsqueeze(2), keys, values, mask).squeeze(2)

    def _needs_all(self, params: SamplingParams) -> bool:
        if params.temperature == 0.0:
            return False
        # Plain sampling from the whole vocabulary needs no ranking, and a small top_k ranks only
        # MAX_CANDIDATES.
        kept = candidates_of(params, self.vocab_size)
        ranked = kept < self.vocab_size or params.top_p < 1.0
        return ranked and kept > MAX_CANDIDATES

    def _send(self, values: Sequence[int]) -> Tensor:
        """Copy to the device; with graphs without waiting for it."""
        if self.graphs is None:
            return self._tensor(values)
        # Pinned, because a copy from pageable memory would block the host.
        return torch.tensor(values).pin_memory().to(self.device, non_blocking=True)

    def _wants(self, slots: Sequence[int]) -> list[int | None]:
        return [self.sampler.num_log_probs[slot] for slot in slots]
