"""The interface between the scheduler and what runs the model: pages of KV cache, slots, passes.

A runner owns the weights in its own layout, the memory of the pages, and one state per slot (a slot
is a row of the batch). The scheduler assigns pages to slots and chooses the slots that continue;
between two passes it may change any of this. All runners compute the same function: plain torch on
any device (runners/torch_runner.py); the same with all state on the device, as CUDA graphs on a GPU
(runners/device_runner.py), there with Triton kernels where they can run
(runners/decode_kernels.py); and compiled kernels on a CPU that has the instructions
(native/runner.py).

Pages. A page holds keys and values of `page_size` consecutive tokens for all layers of one group.
A group is the layers with the same attention window; logical page i of a slot holds positions
[i * page_size, (i + 1) * page_size). Page 0 of every group is scratch: tables have it where a page
is no longer needed (left of the window) or not yet, and no query sees what it holds.

Slots. A slot's state: `length`, how many tokens the model has read into its pages; `token`, the one
at position `length`, which is not read yet; `prev_token`, the token at length - 1 (smear needs it);
whether it is stopped, that is skipped by decode steps; and its sampling parameters. Random numbers
depend on (seed, sample, position) only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from nanochat_core.engine.requests import LogProbs, SamplingParams
from nanochat_core.engine.sampling import SlotSampler


@dataclass(frozen=True, kw_only=True)
class PageGroup:
    """The layers that share an attention window, and the number of their pages."""

    window: int  # keys to the left that a query sees besides itself
    layers: tuple[int, ...]
    num_pages: int  # page 0, the scratch page, included


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens that a slot reads in one prefill pass; they follow what it has read so far.

    The scheduler has put the pages that they are written to into the slot's tables.
    """

    slot: int
    start: int  # position of tokens[0]: tokens already in the slot's pages, own or shared
    prev_token: int  # the token at start - 1; -1 where start is 0
    tokens: Sequence[int]
    wants_logits: bool  # of the last token


@dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """The tokens that `num_steps` decode steps sampled.

    tokens[s][i]: the token of the i-th slot given in step s, -1 if it was stopped before that step.
    log_probs likewise, empty if no slot wants any.
    """

    tokens: list[list[int]]
    log_probs: list[list[LogProbs | None]]


# A decode call: waits for its steps, if they still run on the device, and returns their output.
Pending: TypeAlias = Callable[[], DecodeOutput]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a runner makes room for."""

    groups: tuple[PageGroup, ...]
    page_size: int
    num_slots: int
    max_len: int  # tokens of the longest sequence
    prefill_tokens: int = 512  # that a prefill pass reads at most, of all slots together


class Runner:
    """A model's executor, see the module's docstring. Not thread-safe: only the thread that runs
    the scheduler's steps may call it.

    Here every slot's state is on the host, which controls each step.
    """

    # True if decode returns before its work is done; then the scheduler launches the next steps
    # before it reads the results of the last ones.
    is_asynchronous = False
    # That the logits of `_step` have yet to go through: sampling may need only a few capped.
    _step_softcap: float | None = None

    def __init__(
        self,
        capacity: Capacity,
        *,
        vocab_size: int,
        stop_tokens: Iterable[int],
        device: torch.device,
    ) -> None:
        """Set all slots free."""
        self.groups, self.page_size = capacity.groups, capacity.page_size
        self.num_slots, self.max_len = capacity.num_slots, capacity.max_len
        self.prefill_tokens = capacity.prefill_tokens
        self.vocab_size, self.device = vocab_size, device
        self.stop_tokens = frozenset(stop_tokens)
        # (num_slots,) each. int32, as the compiled kernels read them.
        self.length, self.token, self.prev_token = np.zeros((3, self.num_slots), np.int32)
        self.stopped = np.ones(self.num_slots, np.int32)
        self.sampler = SlotSampler(self.num_slots, device)

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set entries `first` and on of the slot's page table. Entries not set are scratch."""
        raise NotImplementedError

    def clear_table(self, slot: int) -> None:
        """Set all of the slot's entries in all groups to scratch."""
        raise NotImplementedError

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy all layers of a page, for a fork in the middle of one."""
        raise NotImplementedError

    def start(
        self, slot: int, params: SamplingParams, *, key: int, num_log_probs: int | None
    ) -> None:
        """Assign the slot to a new sequence with these sampling parameters; key: see `row_key`. The
        slot is stopped until `sample_first`."""
        self.stopped[slot] = 1
        self.sampler.start(slot, params, key=key, num_log_probs=num_log_probs)

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """Read chunks of any lengths in one pass and set the slots' length and prev_token. Returns
        logits (R, V) fp32 of the chunks that want them, in their order, on the runner's device."""
        raise NotImplementedError

    @torch.inference_mode()
    def sample_first(
        self,
        slots: Sequence[int],
        logits: Tensor,
        lengths: Sequence[int],
        prev_tokens: Sequence[int],
    ) -> DecodeOutput:
        """Sample one token for each slot from its row of logits (n, V), set the slot's state
        (length, prev_token, token) and resume it unless the token stops it (see `decode`). Returns
        the output of one step."""
        tokens, log_probs = self._sample(slots, logits, lengths)
        at = list(slots)
        self.length[at], self.prev_token[at], self.token[at] = lengths, prev_tokens, tokens
        self.stopped[at] = [token in self.stop_tokens for token in tokens]
        return DecodeOutput(tokens=[tokens], log_probs=[log_probs] if log_probs else [])

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """Run `num_steps` steps of the slots given: each reads its token and samples the next one.

        A slot stops itself if the sampled token is one of the stop tokens (the ends of an answer
        and <|python_end|>, given at construction), or if with it prompt and answer hold limits[i]
        tokens: that token is returned, but not read. A stopped slot changes no state. The tables
        hold the pages of every position that will be read: up to
        min(length + num_steps, limits[i] - 1) - 1.
        """
        limit_of = dict(zip(slots, limits, strict=True))
        # A slot at its limit has no token left to read; no step must write beyond its pages.
        for slot, limit in limit_of.items():
            self.stopped[slot] |= self.length[slot] + 1 >= limit
        output = DecodeOutput(tokens=[], log_probs=[])
        for _ in range(num_steps):
            going = [i for i, slot in enumerate(slots) if not self.stopped[slot]]
            column, probs = [-1] * len(slots), list[LogProbs | None]([None]) * len(slots)
            at = [slots[i] for i in going]
            if at:
                logits = self._step(at)
                lengths: list[int] = self.length[at].tolist()
                tokens, log_probs = self._sample(at, logits, lengths, self._step_softcap)
                self.token[at] = tokens
                for i, slot, token, length in zip(going, at, tokens, lengths, strict=True):
                    column[i] = token
                    self.stopped[slot] = token in self.stop_tokens or length + 1 >= limit_of[slot]
                for i, one in zip(going, log_probs, strict=False):
                    probs[i] = one
            output.tokens.append(column)
            output.log_probs.append(probs)
        if all(self.sampler.num_log_probs[slot] is None for slot in slots):
            output.log_probs.clear()
        return lambda: output

    def release(self, slot: int) -> None:
        """Stop the slot. A decode call under way for it may still finish and write its pages."""
        self.stopped[slot] = 1

    def refresh(self) -> None:
        """Load the model's current weights, in place."""
        raise NotImplementedError

    def _step(self, slots: list[int]) -> Tensor:
        """Read the token of each slot, add 1 to its length and return its row of logits (n, V)."""
        raise NotImplementedError

    def _sample(
        self,
        slots: Sequence[int],
        logits: Tensor,
        positions: Sequence[int],
        softcap: float | None = None,
    ) -> tuple[list[int], list[LogProbs | None]]:
        """Sample the token for each slot's position from its row of logits (n, V). Returns the
        tokens and, if a slot wants any, their log-probabilities."""
        tokens = self.sampler.sample(slots, logits, positions, softcap)
        return tokens, self.sampler.log_probs(slots, logits, tokens, softcap)
