"""What the scheduler needs of whatever runs the model: pages of KV cache, slots, and two passes.

A runner owns the weights in the form it wants them, the memory of the pages, and one state per slot
(a slot is a row of the batch). The scheduler says which pages belong to which slot and which slots
go on; between two passes it may change its mind about anything. The runners compute the same
function: plain torch on any device (torch_runner.py), and on a CPU with the instructions for it the
compiled kernels (native_runner.py), which are the faster.

Pages. A page holds keys and values of `page_size` consecutive tokens for all layers of one group.
A group is the layers with the same attention window; logical page i of a slot holds positions
[i * page_size, (i + 1) * page_size). Page 0 of every group is scratch: it stands in tables where no
page is needed any more (left of the window) or not yet, and whatever it holds is never seen.

Slots. A slot remembers: `length`, how many tokens the model has read into its pages; `token`, the
one that comes at position `length` and is not read yet; `before`, the token at length - 1 (smear
needs it); whether it is parked; and how it draws. Randomness belongs to (seed, sample, position).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nanochat_core.engine.requests import LogProbs, SamplingParams


@dataclass(frozen=True, kw_only=True)
class PageGroup:
    """The layers that share an attention window, and how many pages there are for them."""

    window: int  # keys to the left that a query sees besides itself
    layers: tuple[int, ...]
    num_pages: int  # page 0, the scratch page, included


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens that a slot reads in one pass; they follow what it has read so far.

    The scheduler has put the pages they go to into the slot's tables.
    """

    slot: int
    start: int  # position of tokens[0]: what the slot has read, own or through shared pages
    before: int  # the token at start - 1; -1 where start is 0
    tokens: Sequence[int]
    wants_logits: bool  # of the last token


@dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """What `num_steps` decode steps wrote.

    tokens[s][i]: the token that the i-th slot given drew in step s, -1 where it was parked before
    that step. log_probs likewise, empty where none were wanted.
    """

    tokens: list[list[int]]
    log_probs: list[list[LogProbs | None]]


class Pending(Protocol):
    """Work under way on the device."""

    def read(self) -> DecodeOutput:
        """Wait for it."""
        ...


class Done:
    """Work that was over when it was handed out."""

    def __init__(self, columns: DecodeOutput) -> None:
        self._columns = columns

    def read(self) -> DecodeOutput:
        """The columns."""
        return self._columns


class Runner(Protocol):
    """See the module's docstring. Not thread-safe: the scheduler's thread alone calls it."""

    page_size: int
    groups: tuple[PageGroup, ...]
    num_slots: int
    vocab_size: int
    # Whether decode returns before its work is done; then the scheduler launches the next steps
    # before it reads the last ones.
    is_asynchronous: bool

    def set_table(self, group: int, slot: int, first: int, pages: Sequence[int]) -> None:
        """Entries first.. of the slot's page table. Entries not set are scratch."""
        ...

    def clear_table(self, slot: int) -> None:
        """All of the slot's entries in all groups are scratch again."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy all layers of a page, for a sample that goes its own way in the middle of one."""
        ...

    def start(
        self, slot: int, *, draw: SamplingParams, seed: int, sample: int, num_log_probs: int | None
    ) -> None:
        """The slot's next occupant draws like this, and nothing is counted as seen for its
        repetition penalty yet. The slot is parked until `draw_first`."""
        ...

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Count tokens as seen for the slot's repetition penalty: a prompt, forced tokens."""
        ...

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """Read chunks of any lengths in one pass; logits (R, V) fp32 of those that want them, in
        their order, on the runner's device. Sets the slots' length and before."""
        ...

    def draw_first(
        self, slots: Sequence[int], logits: Tensor, lengths: Sequence[int], befores: Sequence[int]
    ) -> DecodeOutput:
        """Draw one token for each slot from its row of logits (n, V), set the slot's state
        (length, before, token) and unpark it unless the token parks (see `decode`). One step."""
        ...

    def decode(self, slots: Sequence[int], limits: Sequence[int], num_steps: int) -> Pending:
        """`num_steps` steps of the slots given: each reads its token and draws the next one.

        A slot parks itself when what it drew is one of the park tokens (the ends of an answer and
        <|python_end|>, told at construction), or when with it prompt and answer hold limits[i]
        tokens: it is told, but not read. A parked slot changes nothing. The tables hold the pages
        of every position that will be read: up to min(length + num_steps, limits[i] - 1) - 1.
        """
        ...

    def release(self, slot: int) -> None:
        """Park the slot; whatever is under way for it may finish into scratch-safe memory."""
        ...

    def refresh(self) -> None:
        """Take over the model's weights, which were written to, in place."""
        ...
