"""Work on many objects of a store at the same time, never on all of them at once."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AHEAD = 4  # items a thread that are asked for before the first result is taken


def in_parallel(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, threads: int
) -> Iterator[_Result]:
    """Results in order; `items` may be endless. The first error is raised in its turn.

    One thread means the caller's own.
    """
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
