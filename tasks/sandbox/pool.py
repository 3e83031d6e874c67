"""Run many programs and their checks in parallel, each in its own sandboxes.

One runs per CPU, so that no deadline passes while a program waits for a CPU. An exception in the
waiting thread, such as Ctrl-C, ends all running programs at once and starts no more.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tasks.sandbox.run import Check, Verdict, run_untrusted


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    runs: Sequence[tuple[str, Check]],
    *,
    seconds: float,
    memory_mb: int,
    num_at_a_time: int | None = None,
) -> list[Verdict]:
    """Return the verdicts on programs, in their order; equal pairs of program and check run once.

    `num_at_a_time` defaults to the number of CPUs; each run may use twice `memory_mb`. Raises
    TaskError as `run_untrusted` does.
    """
    # Sampled answers often repeat.
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
            stop.set()  # pool.map has already cancelled the runs that were not started
            raise
    return [found[run] for run in runs]
