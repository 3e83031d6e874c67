"""Many items at the same time, in order, never all at once."""

import threading
from collections.abc import Iterator
from itertools import count, islice

import pytest

from infra.parallel import in_parallel


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_results_come_in_order_and_items_are_taken_as_needed(threads: int):
    taken: list[int] = []

    def endless() -> Iterator[int]:
        for number in count():
            taken.append(number)
            yield number

    results = in_parallel(lambda number: number * number, endless(), threads=threads)
    assert list(islice(results, 20)) == [number * number for number in range(20)]
    results.close()  # type: ignore[attr-defined]
    assert len(taken) <= 20 + 5 * threads + 1


def test_as_many_threads_work_as_were_asked_for():
    together = threading.Barrier(4)
    list(in_parallel(lambda _: together.wait(100), range(8), threads=4))


def test_one_thread_is_the_callers_own():
    (name,) = in_parallel(lambda _: threading.current_thread().name, [0], threads=1)
    assert name == threading.current_thread().name


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_ends_it_and_little_more_is_begun(threads: int):
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 10:
            raise ValueError("ten")
        return number

    with pytest.raises(ValueError, match="ten"):
        list(in_parallel(work, range(1000), threads=threads))
    assert len(begun) < 100
