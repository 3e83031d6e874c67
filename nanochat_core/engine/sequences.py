"""State of requests in flight: a handle for each request, a sequence for each of its samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from nanochat_core.engine.answer import Answer
from nanochat_core.engine.kv_cache.pages import Tables
from nanochat_core.engine.requests import Event, Request

# How many later requests of the next better priority may go first. Finite, so that a steady stream
# of urgent requests cannot starve the others.
PATIENCE = 64


class Phase(Enum):
    """Stage of a sequence's life in the scheduler."""

    WAITING = "waiting"  # for a slot, or for another sequence to prefill the same prompt
    PREFILL = "prefill"  # has a slot, and tokens that the runner has yet to prefill
    SAMPLE = "sample"  # has a slot, and logits to sample the next token from
    DECODE = "decode"  # has a slot and samples a token in each step
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sample of a request: its tokens, how many the runner has read, and its phase."""

    handle: "RequestHandle"
    index: int
    answer: Answer
    tokens: list[int] = field(init=False)  # prompt and answer: its own list once it has a slot
    read: int = 0  # of `tokens`; while it decodes all but the last are
    logits: Tensor | None = None  # (1, V) of the last token, to sample the next from
    tables: Tables | None = None  # while it has a slot
    keys: list[bytes] = field(default_factory=list)  # of its first full pages, see `prefix_cache`
    phase: Phase = Phase.WAITING
    order: tuple[int, int, int] = field(init=False)

    def __post_init__(self) -> None:
        handle, index = self.handle, self.index
        self.tokens = handle.prompt
        # Sample i ranks as if its request had come i requests later: one request with many samples
        # does not hold up all that come after it.
        place = handle.arrival + PATIENCE * handle.request.priority + index
        self.order = (place, handle.arrival, index)

    @property
    def slot(self) -> int:
        """The slot that it holds."""
        assert self.tables is not None
        assert self.tables.slot is not None
        return self.tables.slot

    @property
    def held(self) -> Tables:
        """The pages that it holds."""
        assert self.tables is not None
        return self.tables

    @property
    def is_fresh(self) -> bool:
        """True if its answer has no token yet."""
        return not self.answer.ids


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """A prefilled prompt, held for the samples of its request that have not begun."""

    tables: Tables
    logits: Tensor  # (1, V) of its last token
    keys: list[bytes]  # of its full pages


@dataclass(kw_only=True, eq=False)
class RequestHandle:
    """A request in flight. Any thread may cancel it."""

    request: Request
    prompt: list[int]
    arrival: int
    limit: int  # tokens that an answer may hold
    on_cancel: Callable[["RequestHandle"], None]
    is_cancelled: bool = False
    sink_failed: bool = False  # it raised: it gets no more events
    seqs: list[TokenSequence] = field(default_factory=list)
    num_to_begin: int = 0  # samples that have neither read nor sampled anything
    first: TokenSequence | None = None  # reads the prompt for the others
    rest: list[TokenSequence] = field(default_factory=list)  # wait for it
    prefix: SharedPrefix | None = None

    @property
    def total(self) -> int:
        """Tokens that prompt and answer may hold."""
        return len(self.prompt) + self.limit

    def cancel(self) -> None:
        """Cancel the request; the next step frees its slots and pages."""
        # The flag first: `steps` reads it and discards tokens that were sampled meanwhile.
        self.is_cancelled = True
        self.on_cancel(self)


def emit(handle: RequestHandle, event: Event) -> None:
    """Pass an event to the request's sink. A sink that raises gets no more events, and its request
    is cancelled."""
    if handle.sink_failed:
        return
    try:
        handle.request.sink(event)
    except Exception:  # noqa: BLE001 - a client's error concerns its own request alone
        handle.sink_failed = True
        handle.cancel()


@dataclass(kw_only=True)
class Counts:
    """Running totals of a scheduler."""

    in_flight: int = 0  # samples that have not ended
    prefix_tokens: int = 0  # of prompts, taken from the cache or from another sample
    cancellations: int = 0  # requests
    preemptions: int = 0  # samples
    failures: int = 0  # samples
