"""Try again: a request until its service answers, and work that failed, after a growing pause."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from infra.polling import ASK_SECONDS

TRIES = 3  # of what may fail for good: bytes that are damaged, a first contact
FIRST_PAUSE = 5.0  # seconds before work that failed once is done again
LONGEST_PAUSE = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often a request that gets no answer is repeated, and after which pauses, in seconds."""

    tries: float = inf
    first_wait: float = ASK_SECONDS  # doubles each time, with random jitter
    longest_wait: float = ASK_SECONDS
    deadline: float = inf  # seconds after which no new try begins

    def wait(self, tries: int) -> float:
        """Return the seconds to wait after so many tries."""
        # Jitter: clients that failed together must not all come back together.
        return _doubled(self.first_wait, tries, self.longest_wait) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class NoAnswer:
    """A try that got no answer."""

    error: Exception
    tries: int  # so far, this one included
    seconds: float  # since the first one began


def until_answered(
    request: Callable[[], _T],
    errors: type[Exception] | tuple[type[Exception], ...],
    *,
    policy: RetryPolicy = RetryPolicy(),
    on_failure: Callable[[NoAnswer], None] = lambda failure: None,
    wait: Callable[[float], object] | None = None,
) -> _T:
    """Return what `request` returns; repeat it while it raises one of `errors`.

    The request must be idempotent: one without an answer may have been carried out. `on_failure`
    gets each such error, and may raise another to give up; the last error that the policy allows
    is raised. `wait` replaces time.sleep, and may raise too.
    """
    began, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return request()
        except errors as error:
            pause, seconds = policy.wait(tries), time.monotonic() - began
            on_failure(NoAnswer(error=error, tries=tries, seconds=seconds))
            # A pause that would end after the deadline is not begun.
            if tries >= policy.tries or seconds + pause > policy.deadline:
                raise
        (wait or time.sleep)(pause)


def after_failure(failures: int) -> float:
    """Return the seconds to wait before work that failed so often in a row is done again."""
    return _doubled(FIRST_PAUSE, failures, LONGEST_PAUSE) if failures else 0.0


def _doubled(first: float, number: int, longest: float) -> float:
    # The exponent is bounded, since a huge one overflows a float.
    return min(first * 2 ** min(number - 1, 60), longest)
