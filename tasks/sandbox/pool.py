"""Many programs and their checks at a time, each in sandboxes of its own.

So many are in flight as there are CPUs to run them, so that the deadline of one does not run out
while it waits for the others. An exception in the thread that waits, such as Ctrl-C, ends all that
are in flight at once and starts no more.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tasks.sandbox.run import Check, Verdict, run_untrusted


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    runs: Sequence[tuple[str, Check]],
    *,
    seconds: float,
    memory_mb: int,
    num_at_a_time: int | None = None,
) -> list[Verdict]:
    """The verdicts on programs, in their order; a program that comes twice for a check runs once.

    `num_at_a_time` is the number of CPUs when it is not given; each may take twice `memory_mb`.
    Raises TaskError as `run_untrusted` does.
    """
    different = list(dict.fromkeys(runs))
    stop = threading.Event()

    def verdict(run: tuple[str, Check]) -> Verdict:
        program, check = run
        return run_untrusted(program, check=check, seconds=seconds, memory_mb=memory_mb, stop=stop)

    with ThreadPoolExecutor(num_at_a_time or usable_cpus(), "sandbox") as pool:
        try:
            verdicts: Iterator[Verdict] = pool.map(verdict, different)
            found = dict(zip(different, verdicts, strict=True))
        except BaseException:
            stop.set()  # and pool.map has taken back what was not begun
            raise
    return [found[run] for run in runs]
