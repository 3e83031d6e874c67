"""The runner in plain torch with every slot's state on the device: the host only names the slots.

A step reads and writes its rows' state and outputs the sampled tokens without waiting for the host:
the next one may be launched before this one is done. Stopped rows are computed too and change
nothing. On a GPU cuda_graphs.py captures the step; it also runs on a CPU, where it is tested.

No GPU has run it yet.

Shapes: B rows of a step, W pages that are looked at, S tokens of a page, T = W * S keys, H query
heads, K key/value heads, D head dim, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runner import Capacity, DecodeOutput, Pending
from nanochat_core.engine.runners.forward import forward
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import (
    GREEDY,
    SamplingRows,
    candidates_of,
    cap,
    log_probs,
    read_log_probs,
    row_of,
    sample_rows,
)
from nanochat_core.model.attention_backends import mixed
from nanochat_core.model.gpt import GPT

MOST_CANDIDATES = 256  # a larger top_k, and what needs the whole vocabulary, takes a slower step
MOST_LOG_PROBS = 20  # alternatives returned with a token

# (group, layer, q (B, H, D), positions (B,), table (B, pages)) -> (B, H, D), over a layer's pages,
# in which the keys and values of `positions` are by now.
Attend: TypeAlias = Callable[[int, int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The features that a step needs; steps of one kind are the same sequence of operations."""

    num_rows: int
    num_pages: int  # the longest row's; 0 if attention does not need it
    all_candidates: bool  # samples from more than MOST_CANDIDATES, or with a repetition penalty
    wants_log_probs: bool


class StepOutput(NamedTuple):
    """A step's output; log-probabilities are empty if not wanted."""

    tokens: Tensor  # (B,), -1 of stopped rows
    chosen: Tensor  # (B,)
    ids: Tensor  # (B, MOST_LOG_PROBS)
    values: Tensor  # (B, MOST_LOG_PROBS)


class State:
    """Tensors of the slots and, at the end, of one that is always stopped, for rows to spare."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        count = num_slots + 1
        integers = torch.zeros((5, count), dtype=torch.int64, device=device)
        self.length, self.prev_token, self.token, self.limit, self.key = integers
        self.stopped = torch.ones(count, dtype=torch.bool, device=device)
        self.params = SamplingRows.of([GREEDY] * count, vocab_size=vocab_size, device=device)
        self.seen = torch.zeros((count, vocab_size), dtype=torch.bool, device=device)


def read_output(steps: Sequence[StepOutput], wants: Sequence[int | None]) -> DecodeOutput:
    """Return the output of steps that are done. wants: alternatives that each row gets; None: no
    log-probabilities."""
    count = len(wants)  # rows beyond it are spare ones of a graph
    tokens = [step.tokens[:count].tolist() for step in steps]
    if all(number is None for number in wants):
        return DecodeOutput(tokens=tokens, log_probs=[])
    log_probs = [
        read_log_probs(
            (step.chosen, step.ids, step.values),
            [n if token >= 0 else None for n, token in zip(wants, column, strict=True)],
        )
        for step, column in zip(steps, tokens, strict=True)
    ]
    return DecodeOutput(tokens=tokens, log_probs=log_probs)


class DeviceRunner(TorchRunner):
    """Runs `model`, see runner.py and torch_runner.py."""

    def __init__(
        self, model: GPT, capacity: Capacity, *, dtype: torch.dtype, stop_tokens: Iterable[int]
    ) -> None:
        super().__init__(model, capacity, dtype=dtype, stop_tokens=stop_tokens)
        self.state = State(self.num_slots, self.vocab_size, self.device)
        self.sampler.seen = self.state.seen
        self._stops = self._tensor(sorted(self.stop_tokens) or [-2])
        shape = (self.num_slots + 1, self.pools[0].table.shape[1])
        self.tables = [
            torch.zeros(shape, dtype=torch.int32, device=self.device) for _ in self.pools
        ]
        self.attend: Attend = self._attend

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
        assert (num_log_probs or 0) <= MOST_LOG_PROBS, f"{num_log_probs} alternatives"
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

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """See runner.py."""
        rows = self._tensor(slots)
        self.state.limit[rows] = self._tensor(limits)
        kind = self.kind_of(slots, limits, num_rows=len(slots))
        outputs = [self.step(kind, rows) for _ in range(num_steps)]
        return partial(read_output, outputs, self._wants(slots))

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
        table = self.pools[0].table.shape[1]
        return Kind(
            num_rows=num_rows,
            num_pages=min(1 << max(pages - 1, 0).bit_length(), table),
            all_candidates=any(self._needs_all(self.sampler.params[slot]) for slot in slots),
            wants_log_probs=any(count is not None for count in self._wants(slots)),
        )

    def step(self, kind: Kind, rows: Tensor) -> StepOutput:
        """Run one step of the slots `rows` (B,). Spare rows name the last slot, always stopped."""
        state = self.state
        token, prev_token, length = state.token[rows], state.prev_token[rows], state.length[rows]
        # A slot at its limit has no further token to read.
        goes = ~state.stopped[rows] & (length + 1 < state.limit[rows])
        positions = length.clamp(max=self.max_len - 1)
        tables = [table[rows] for table in self.tables]
        entry = (positions // self.page_size)[:, None]
        # Stopped rows write their keys and values into the scratch page, which is page 0.
        places = [
            torch.where(goes, table.gather(1, entry)[:, 0], 0) * self.page_size
            + positions % self.page_size
            for table in tables
        ]

        def attention_fn(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = self._group_of[layer]
            self.pools[group].write(layer, places[group], k, v)
            table = tables[group][:, : kind.num_pages] if kind.num_pages else tables[group]
            return self.attend(group, layer, q, positions, table)

        logits = cap(
            forward(self.weights, token, prev_token, positions, attention_fn), self._softcap
        )
        vocab = self.vocab_size
        new = sample_rows(
            logits,
            state.key[rows],
            length + 1,
            state.params.take(rows),
            num_candidates=vocab if kind.all_candidates else min(MOST_CANDIDATES, vocab),
            seen=state.seen[rows] if kind.all_candidates else None,
        )
        state.prev_token[rows] = torch.where(goes, token, prev_token)
        state.token[rows] = torch.where(goes, new, token)
        state.length[rows] = length + goes
        # The new token is at position length + 1: with it prompt and answer hold length + 2.
        ends = (new[:, None] == self._stops).any(dim=-1) | (length + 2 >= state.limit[rows])
        state.stopped[rows] = ~goes | ends
        if kind.all_candidates:
            state.seen[rows, new] |= goes
        # Empty tensors and not None: all kinds of steps then have outputs of one form.
        nothing = logits[:0, 0]
        chosen, ids, values = (
            log_probs(logits, new, min(MOST_LOG_PROBS, vocab))
            if kind.wants_log_probs
            else (nothing, nothing.long(), nothing)
        )
        return StepOutput(tokens=torch.where(goes, new, -1), chosen=chosen, ids=ids, values=values)

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
        # MOST_CANDIDATES.
        kept = candidates_of(params, self.vocab_size)
        ranked = kept < self.vocab_size or params.top_p < 1.0
        return params.repetition_penalty != 1.0 or (ranked and kept > MOST_CANDIDATES)

    def _wants(self, slots: Sequence[int]) -> list[int | None]:
        return [self.sampler.num_log_probs[slot] for slot in slots]
