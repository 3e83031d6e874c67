"""The one parallel map: requests to a store, and transfers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

THREADS = 8
_AHEAD = 4  # items per thread submitted ahead of the result that is taken
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_parallel(
    function: Callable[[_Item], _Result],
    items: Iterable[_Item],
    *,
    threads: int = THREADS,
    end: Callable[[], None] = lambda: None,
) -> Iterator[_Result]:
    """Yield results in order; `items` may be endless. A call's error is raised at its position.

    Then no further call begins, and `end` is called before the wait for those that run: it may
    stop them. `threads=1` runs in the caller's own thread, without `end`.
    """
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads * _AHEAD:  # bounds memory for endless `items`
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            end()
            for future in waiting:
                future.cancel()
