"""The engine's request and event types, and the check of a request's numbers.

Token ids only: callers handle text, conversations and stop strings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from nanochat_core.errors import DataError

# The only error text that a client gets for a runner's exception: the exception's own message may
# quote a prompt or a path.
ENGINE_FAILED = "the engine failed"
MAX_LOG_PROBS = 20  # alternatives returned with a token
MAX_SAMPLES = 4096  # of a request
MAX_TEMPERATURE = 1000.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings with which the next token is sampled from the logits."""

    temperature: float = 1.0  # 0: always the likeliest token, whatever the rest says
    top_k: int | None = None  # the k likeliest compete; None, 0 and below: all
    top_p: float = 1.0  # the fewest likeliest tokens of this probability together compete


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities in nats of a token and its alternatives.

    They are of the model's own distribution, before `SamplingParams` changed it.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and their log-probabilities


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One token of a sample; the token that ends the sample has an event too."""

    sample: int
    token: int
    sampled: bool  # by the model; otherwise forced by a tool
    log_probs: LogProbs | None  # where the request wants them and the model sampled the token


@dataclass(frozen=True, kw_only=True)
class EndEvent:
    """The last event of a sample."""

    sample: int
    # "stop": the model ended it. "length": max_tokens or the context is full. "cancelled": the
    # client cancelled the request. "failed": the engine could not continue; `error` says why.
    reason: Literal["stop", "length", "cancelled", "failed"]
    error: str = ""
    cause: Exception | None = field(default=None, compare=False)  # for logs within this process


Event: TypeAlias = TokenEvent | EndEvent


@dataclass(frozen=True, kw_only=True)
class Request:
    """`num_samples` answers to one prompt.

    `sink` takes the events on the engine's thread, those of a sample in order; it must be quick.
    """

    prompt: Sequence[int]
    sink: Callable[[Event], None]
    num_samples: int = 1
    max_tokens: int | None = None  # of one answer, the ending token not counted; None: the context
    params: SamplingParams = SamplingParams()
    seed: int = 42  # sample i has the same random numbers alone and among other requests
    cache_salt: int = 0  # 0 or more; cached pages are shared among requests of one salt
    priority: int = 0  # lower runs first; equal ones in order of arrival
    num_log_probs: int | None = None  # alternatives for each token; None: no log_probs at all


def check_request(request: Request, *, most_log_probs: int) -> None:
    """Raise DataError if a number is out of the range that runners can sample with."""
    params, alternatives = request.params, request.num_log_probs
    for name, value, least, most in (
        ("temperature", params.temperature, 0.0, MAX_TEMPERATURE),
        ("top_p", params.top_p, 0.0, 1.0),
        ("num_samples", request.num_samples, 0, MAX_SAMPLES),
        ("num_log_probs", 0 if alternatives is None else alternatives, 0, most_log_probs),
        ("seed", request.seed, -(2**63), 2**63 - 1),
    ):
        # Written so that NaN, for which every comparison is false, is refused too.
        if not least <= value <= most:
            raise DataError(
                f"{name} is {value}, expected {least} to {most}",
                hint=f"ask again with a {name} in that range",
            )
