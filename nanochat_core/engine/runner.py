"""The interface between the scheduler and what runs the model: pages of KV cache, slots, passes.

A runner owns the weights in its own layout, the memory of the pages, and one state per slot (a slot
is a row of the batch). The scheduler assigns pages to slots and chooses the slots that continue;
between two passes it may change any of this. All runners compute the same function: plain torch on
any device (runners/torch_runner.py), CUDA graphs on a GPU (runners/cuda_graphs.py), and compiled
kernels on a CPU that has the instructions (native/runner.py).

Pages. A page holds keys and values of `page_size` consecutive tokens for all layers of one group.
A group is the layers with the same attention window; logical page i of a slot holds positions
[i * page_size, (i + 1) * page_size). Page 0 of every group is scratch: tables have it where a page
is no longer needed (left of the window) or not yet, and no query sees what it holds.

Slots. A slot's state: `length`, how many tokens the model has read into its pages; `token`, the one
at position `length`, which is not read yet; `before`, the token at length - 1 (smear needs it);
whether it is parked, that is skipped by decode steps; and its sampling parameters. Random numbers
depend on (seed, sample, position) only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nanochat_core.engine.requests import LogProbs, SamplingParams


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
    before: int  # the token at start - 1; -1 where start is 0
    tokens: Sequence[int]
    wants_logits: bool  # of the last token


@dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """The tokens that `num_steps` decode steps sampled.

    tokens[s][i]: the token of the i-th slot given in step s, -1 if it was parked before that step.
    log_probs likewise, empty if no slot wants any.
    """

    tokens: list[list[int]]
    log_probs: list[list[LogProbs | None]]


class Pending(Protocol):
    """A decode call under way on the device."""

    def read(self) -> DecodeOutput:
        """Wait for the call and return its output."""
        ...


class Done:
    """The `Pending` of a synchronous runner: its output is known."""

    def __init__(self, columns: DecodeOutput) -> None:
        self._columns = columns

    def read(self) -> DecodeOutput:
        """Return the output."""
        return self._columns


class Runner(Protocol):
    """A model's executor, see the module's docstring. Not thread-safe: only the thread that runs
    the scheduler's steps may call it."""

    page_size: int
    groups: tuple[PageGroup, ...]
    num_slots: int
    vocab_size: int
    # True if decode returns before its work is done; then the scheduler launches the next steps
    # before it reads the results of the last ones.
    is_asynchronous: bool

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set entries `first` and on of the slot's page table. Entries not set are scratch."""
        ...

    def clear_table(self, slot: int) -> None:
        """Set all of the slot's entries in all groups to scratch."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy all layers of a page, for a fork in the middle of one."""
        ...

    def start(
        self, slot: int, *, draw: SamplingParams, seed: int, sample: int, num_log_probs: int | None
    ) -> None:
        """Assign the slot to a new sequence with these sampling parameters. No token counts as seen
        for its repetition penalty yet, and the slot is parked until `draw_first`."""
        ...

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Count tokens as seen for the slot's repetition penalty: a prompt, forced tokens."""
        ...

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """Read chunks of any lengths in one pass and set the slots' length and before. Returns
        logits (R, V) fp32 of the chunks that want them, in their order, on the runner's device."""
        ...

    def draw_first(
        self, slots: Sequence[int], logits: Tensor, lengths: Sequence[int], befores: Sequence[int]
    ) -> DecodeOutput:
        """Sample one token for each slot from its row of logits (n, V), set the slot's state
        (length, before, token) and unpark it unless the token parks (see `decode`). Returns the
        output of one step."""
        ...

    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """Run `num_steps` steps of the slots given: each reads its token and samples the next one.

        A slot parks itself if the sampled token is one of the park tokens (the ends of an answer
        and <|python_end|>, given at construction), or if with it prompt and answer hold limits[i]
        tokens: that token is returned, but not read. A parked slot changes no state. The tables
        hold the pages of every position that will be read: up to
        min(length + num_steps, limits[i] - 1) - 1.
        """
        ...

    def release(self, slot: int) -> None:
        """Park the slot. A decode call under way for it may still finish and write its pages."""
        ...

    def refresh(self) -> None:
        """Load the model's current weights, in place."""
        ...
