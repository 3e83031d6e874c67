"""The runner in plain torch with every slot's state on the device: the host only names the slots.

A step reads and writes its rows' state and outputs the sampled tokens without waiting for the host:
the next one may be launched before this one is done. Parked rows are computed too and change
nothing. On a GPU cuda_graphs.py captures the step; it also runs on a CPU, where it is tested.

No GPU has run it yet.

Shapes: B rows of a step, W pages that are looked at, S tokens of a page, T = W * S keys, H query
heads, K key/value heads, D head dim, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.requests import LogProbs, SamplingParams
from nanochat_core.engine.runner import DecodeOutput, PageGroup
from nanochat_core.engine.runners.forward import read_tokens
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import DrawRows, candidates_of, cap, log_probs, sample_rows
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
    all_candidates: bool  # draws from more than MOST_CANDIDATES, or with a repetition penalty
    tells: bool  # log-probabilities


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """A step's output: tokens (B,), -1 of parked rows; log-probabilities, empty if not wanted."""

    tokens: Tensor
    chosen: Tensor  # (B,)
    ids: Tensor  # (B, MOST_LOG_PROBS)
    values: Tensor  # (B, MOST_LOG_PROBS)


class State:
    """Tensors of the slots and, at the end, of one that is always parked, for rows to spare."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        count = num_slots + 1

        def numbers(value: float, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self.length, self.before, self.token = numbers(0), numbers(-1), numbers(0)
        self.limit, self.key = numbers(0), numbers(0)
        self.parked = torch.ones(count, dtype=torch.bool, device=device)
        self.draws = DrawRows(
            temperature=numbers(0, torch.float32),
            top_k=numbers(vocab_size),
            top_p=numbers(1, torch.float32),
            min_p=numbers(0, torch.float32),
            repetition_penalty=numbers(1, torch.float32),
        )
        self.seen = torch.zeros((count, vocab_size), dtype=torch.bool, device=device)

    def draws_of(self, rows: Tensor) -> DrawRows:
        """Return the sampling parameters of slots `rows` (B,)."""
        d = self.draws
        return DrawRows(
            temperature=d.temperature[rows],
            top_k=d.top_k[rows],
            top_p=d.top_p[rows],
            min_p=d.min_p[rows],
            repetition_penalty=d.repetition_penalty[rows],
        )


class Launched:
    """The `Pending` of steps under way on a GPU, or done on a CPU."""

    def __init__(
        self, told: Sequence[StepTokens], wants: Sequence[int | None], wait: Callable[[], None]
    ) -> None:
        """Hold the output of each step, which the host can read after `wait`. wants: alternatives
        that each row gets; None: no log-probabilities."""
        self._outputs, self._wants, self._wait = told, wants, wait

    def read(self) -> DecodeOutput:
        """See runner.py."""
        self._wait()
        count = len(self._wants)  # rows beyond it are spare ones of a graph
        tokens = [step.tokens[:count].tolist() for step in self._outputs]
        if all(number is None for number in self._wants):
            return DecodeOutput(tokens=tokens, log_probs=[])
        thoughts: list[list[LogProbs | None]] = []
        for step, column in zip(self._outputs, tokens, strict=True):
            rows = zip(step.chosen.tolist(), step.ids.tolist(), step.values.tolist(), strict=True)
            thoughts.append(
                [
                    LogProbs(chosen=chosen, top=tuple(zip(ids, values, strict=True))[:number])
                    if number is not None and token >= 0
                    else None
                    for (chosen, ids, values), number, token in zip(
                        rows, self._wants, column, strict=False
                    )
                ]
            )
        return DecodeOutput(tokens=tokens, log_probs=thoughts)


class DeviceRunner(TorchRunner):
    """Runs `model`, see runner.py and torch_runner.py."""

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
        self.state = State(num_slots, self.vocab_size, self.device)
        self._seen = self.state.seen
        self._parks = self._tensor(sorted(self.park_tokens) or [-2])
        self.tables = [
            torch.zeros((num_slots + 1, pool.table.shape[1]), dtype=torch.int32, device=self.device)
            for pool in self.pools
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
        self, slot: int, *, draw: SamplingParams, seed: int, sample: int, num_log_probs: int | None
    ) -> None:
        """See runner.py."""
        assert (num_log_probs or 0) <= MOST_LOG_PROBS, f"{num_log_probs} alternatives"
        super().start(slot, draw=draw, seed=seed, sample=sample, num_log_probs=num_log_probs)
        state = self.state
        state.parked[slot] = True
        state.key[slot] = self.slots[slot].key
        state.draws.temperature[slot] = draw.temperature
        state.draws.top_k[slot] = candidates_of(draw, self.vocab_size)
        state.draws.top_p[slot] = draw.top_p
        state.draws.min_p[slot] = draw.min_p
        state.draws.repetition_penalty[slot] = draw.repetition_penalty

    @torch.inference_mode()
    def draw_first(
        self, slots: Sequence[int], logits: Tensor, lengths: Sequence[int], befores: Sequence[int]
    ) -> DecodeOutput:
        """See runner.py."""
        columns = super().draw_first(slots, logits, lengths, befores)
        rows, state = self._tensor(slots), self.state
        state.length[rows], state.before[rows] = self._tensor(lengths), self._tensor(befores)
        state.token[rows] = self._tensor(columns.tokens[0])
        parked = [self.slots[slot].parked for slot in slots]
        state.parked[rows] = torch.tensor(parked, device=self.device)
        return columns

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Launched:
        """See runner.py."""
        rows = self._tensor(slots)
        self.state.limit[rows] = self._tensor(limits)
        kind = self.kind_of(slots, limits, num_rows=len(slots))
        outputs = [self.step(kind, rows) for _ in range(num_steps)]
        return Launched(outputs, self._wants(slots), lambda: None)

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """See runner.py."""
        super().release(slot)
        self.state.parked[slot] = True

    def kind_of(self, slots: Sequence[int], limits: Sequence[int], *, num_rows: int) -> Kind:
        """Return the kind of step that these slots need."""
        states = [self.slots[slot] for slot in slots]
        # By the limits and not by the lengths, which only the device knows; rounded up to a power
        # of two, so that there are few kinds and so few graphs.
        pages = -(-max(limits, default=1) // self.page_size)
        table = self.pools[0].table.shape[1]
        return Kind(
            num_rows=num_rows,
            num_pages=min(1 << max(pages - 1, 0).bit_length(), table),
            all_candidates=any(self._needs_all(state.draw) for state in states),
            tells=any(state.num_log_probs is not None for state in states),
        )

    def step(self, kind: Kind, rows: Tensor) -> StepTokens:
        """Run one step of the slots `rows` (B,). Spare rows name the last slot, always parked."""
        state = self.state
        token, before, length = state.token[rows], state.before[rows], state.length[rows]
        # A slot at its limit has no further token to read.
        goes = ~state.parked[rows] & (length + 1 < state.limit[rows])
        positions = length.clamp(max=self.max_len - 1)
        tables = [table[rows] for table in self.tables]
        entry = (positions // self.page_size)[:, None]
        # Parked rows write their keys and values into the scratch page, which is page 0.
        places = [
            torch.where(goes, table.gather(1, entry)[:, 0], 0) * self.page_size
            + positions % self.page_size
            for table in tables
        ]

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = self._group_of[layer]
            self.pools[group].write(layer, places[group], k, v)
            table = tables[group][:, : kind.num_pages] if kind.num_pages else tables[group]
            return self.attend(group, layer, q, positions, table)

        logits = cap(read_tokens(self.weights, token, before, positions, mix), self._softcap)
        vocab = self.vocab_size
        new = sample_rows(
            logits,
            state.key[rows],
            length + 1,
            state.draws_of(rows),
            num_candidates=vocab if kind.all_candidates else min(MOST_CANDIDATES, vocab),
            seen=state.seen[rows] if kind.all_candidates else None,
        )
        state.before[rows] = torch.where(goes, token, before)
        state.token[rows] = torch.where(goes, new, token)
        state.length[rows] = length + goes
        # The new token is at position length + 1: with it prompt and answer hold length + 2.
        ends = (new[:, None] == self._parks).any(dim=-1) | (length + 2 >= state.limit[rows])
        state.parked[rows] = ~goes | ends
        if kind.all_candidates:
            state.seen[rows, new] |= goes
        # Empty tensors and not None: all kinds of steps then have outputs of one form.
        nothing = logits[:0, 0]
        chosen, ids, values = (
            log_probs(logits, new, min(MOST_LOG_PROBS, vocab))
            if kind.tells
            else (nothing, nothing.long(), nothing)
        )
        return StepTokens(tokens=torch.where(goes, new, -1), chosen=chosen, ids=ids, values=values)

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

    def _needs_all(self, draw: SamplingParams) -> bool:
        if draw.temperature == 0.0:
            return False
        # Plain sampling from the whole vocabulary needs no ranking, and a small top_k ranks only
        # MOST_CANDIDATES.
        kept = candidates_of(draw, self.vocab_size)
        ranked = kept < self.vocab_size or draw.top_p < 1.0
        return draw.repetition_penalty != 1.0 or (ranked and kept > MOST_CANDIDATES)

    def _wants(self, slots: Sequence[int]) -> list[int | None]:
        return [self.slots[slot].num_log_probs for slot in slots]
