"""What is in flight: a request's ticket and its samples, as the scheduler keeps them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from nanochat_core.engine.answer import Answer
from nanochat_core.engine.kv_cache.pages import Tables
from nanochat_core.engine.requests import Event, Request

# How many later requests of the next better priority may go first: waiting has an end.
PATIENCE = 64


class Phase(Enum):
    """Where a sample is."""

    WAITING = "waiting"  # for a slot, or for its prompt to be read by another sample
    READING = "reading"  # has a slot, and tokens that the runner is yet to read
    DRAWING = "drawing"  # has a slot, and logits to draw the next token from
    DECODING = "decoding"  # has a slot and draws a token in each step
    OVER = "over"


class TokenSequence:
    """One answer: its tokens, what the runner has read of them, and where it is."""

    __slots__ = (
        "answer",
        "index",
        "keys",
        "logits",
        "order",
        "phase",
        "read",
        "tables",
        "ticket",
        "tokens",
    )

    def __init__(self, ticket: "RequestHandle", index: int, answer: Answer) -> None:
        self.ticket = ticket
        self.index = index
        self.answer = answer
        self.tokens = ticket.prompt  # and its answer: its own list once it has a slot
        self.read = 0  # of `tokens`; while it decodes all but the last are
        self.logits: Tensor | None = None  # (1, V) of the last token, to draw the next from
        self.tables: Tables | None = None  # while it has a slot
        self.keys: list[bytes] = []  # of its first full pages, see `prefix_cache`
        self.phase = Phase.WAITING
        # A request's samples take turns with those of later requests.
        place = ticket.arrival + PATIENCE * ticket.request.priority + index
        self.order = (place, ticket.arrival, index)

    @property
    def slot(self) -> int:
        """The slot that it has."""
        assert self.tables is not None
        assert self.tables.slot is not None
        return self.tables.slot

    @property
    def held(self) -> Tables:
        """The pages that it has."""
        assert self.tables is not None
        return self.tables

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of its answer is there."""
        return not self.answer.ids


@dataclass(frozen=True, kw_only=True)
class SharedPrefix:
    """A prompt that was read, for the samples that are yet to begin."""

    tables: Tables
    logits: Tensor  # (1, V) of its last token
    keys: list[bytes]  # of its full pages


@dataclass(kw_only=True, eq=False)
class RequestHandle:
    """A request that was taken. Any thread may call it off."""

    request: Request
    prompt: list[int]
    arrival: int
    limit: int  # tokens that an answer may hold
    call_off: Callable[["RequestHandle"], None]
    is_cancelled: bool = False
    sink_failed: bool = False  # it raised: nothing is told any more
    is_queued: bool = True  # no sample has begun
    samples: list[TokenSequence] = field(default_factory=list)
    num_to_begin: int = 0  # samples that neither read nor drew anything
    leader: TokenSequence | None = None  # reads the prompt for the others
    followers: list[TokenSequence] = field(default_factory=list)  # wait for the leader
    stem: SharedPrefix | None = None

    @property
    def total(self) -> int:
        """Tokens that prompt and answer may hold."""
        return len(self.prompt) + self.limit

    def cancel(self) -> None:
        """Call the request off: at the next step its slots and pages are free."""
        self.is_cancelled = True
        self.call_off(self)


def tell(ticket: RequestHandle, event: Event) -> None:
    """Hand an event over. A sink that raises gets no more, and its request is called off."""
    if ticket.sink_failed:
        return
    try:
        ticket.request.sink(event)
    except Exception:  # noqa: BLE001 - whatever it is, it is of this request alone
        ticket.sink_failed = True
        ticket.cancel()


@dataclass(kw_only=True)
class Counts:
    """What `Stats` counts, as it goes."""

    in_flight: int = 0  # samples that are not over
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    tokens: int = 0
    cancellations: int = 0
    preemptions: int = 0
    failures: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Numbers of a scheduler for people to watch; counts are since it was made."""

    slots: int
    running: int  # samples that have a slot
    waiting: int  # samples that have none
    queued: int  # requests of which no sample has begun
    pages: int  # of all groups
    pages_free: int  # hold nothing
    pages_cached: int  # held by nobody and kept for a prompt that begins alike
    requests: int
    prompt_tokens: int  # of all prompts that were begun, repetitions included
    prefix_tokens: int  # of these, taken from the cache or from another sample
    tokens: int  # told, forced ones included
    cancellations: int  # requests
    preemptions: int  # samples
    failures: int  # samples
    steps: int  # decode steps
    seconds_per_step: float  # of late

    @property
    def pages_used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - self.pages_free - self.pages_cached
