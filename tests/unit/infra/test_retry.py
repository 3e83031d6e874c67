"""What is repeated: a request without an answer, work that failed, a write that lost a race."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from infra.retry import (
    NoAnswer,
    RetryPolicy,
    after_failure,
    until_answered,
)
from infra.storage.base import SWAPS, StoreUnavailable, swap_until_won

QUICK = RetryPolicy(tries=3, first_wait=0.0)


def failing(*errors: Exception) -> Callable[[], str]:
    left: Iterator[Exception] = iter(errors)

    def request() -> str:
        for error in left:
            raise error
        return "done"

    return request


def test_a_request_is_repeated_until_it_is_answered() -> None:
    failures: list[NoAnswer] = []
    request = failing(OSError("a"), OSError("b"))
    assert until_answered(request, OSError, policy=QUICK, on_failure=failures.append) == "done"
    assert [(str(f.error), f.tries) for f in failures] == [("a", 1), ("b", 2)]
    request = failing(*(OSError(str(n)) for n in range(9)))
    with pytest.raises(OSError, match="2"):
        until_answered(request, OSError, policy=QUICK)


def test_another_error_is_raised_at_once() -> None:
    with pytest.raises(ValueError, match="ours"):
        until_answered(failing(ValueError("ours")), OSError, policy=QUICK)


def test_a_callback_and_a_wait_may_give_up() -> None:
    def give_up(_: object) -> None:
        raise KeyError("stopped")

    for callbacks in ({"on_failure": give_up}, {"wait": give_up}):
        with pytest.raises(KeyError, match="stopped"):
            until_answered(failing(OSError()), OSError, policy=QUICK, **callbacks)


def test_no_try_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("infra.retry.time", clock)
    policy = RetryPolicy(tries=10**6, first_wait=1.0, longest_wait=4.0, deadline=20.0)
    with pytest.raises(OSError, match=r"\Z"):
        until_answered(failing(*[OSError()] * 100), OSError, policy=policy)
    assert 12 < now[0] <= 20
    forever = RetryPolicy(first_wait=1.0, longest_wait=4.0)
    assert until_answered(failing(*[OSError()] * 100), OSError, policy=forever) == "done"


def test_pauses_of_requests_double_with_jitter_and_those_of_work_without() -> None:
    policy = RetryPolicy(first_wait=1.0, longest_wait=4.0)
    for tries, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 4.0), (10**6, 4.0)):
        assert most / 2 <= policy.wait(tries) <= most
    assert [after_failure(n) for n in range(8)] == [0, 5, 10, 20, 40, 60, 60, 60]


def test_a_swap_is_repeated_until_it_wins() -> None:
    results = iter([None, None, "mine", "another"])
    assert swap_until_won("a tag", lambda: next(results)) == "mine"
    tried: list[None] = []
    with pytest.raises(StoreUnavailable, match="a tag changes faster than it can be written"):
        swap_until_won("a tag", lambda: tried.append(None))
    assert len(tried) == SWAPS
