"""A quarter of an hour on one GPU: `python bench/gpu quarter [--minutes N] [--out DIRECTORY]`.

The steps are schedule.py's, in order of their value; scheduler.py runs what fits into the minutes.
All that is found is in the one directory: results.json, table.txt and log.txt, written again after
each result. A step that fails is shown with the last lines of its errors, and the others go on.
Exit 1: a step failed, or this was stopped by a signal. See README.md beside this file.

`--dry` runs every step's program on a CPU at its smallest size, in processes forked from one that
has torch: it shows that they run, and measures nothing. What only a GPU gives is marked so.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SLOW = 4  # times a GPU's hard ends, on a CPU
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
sys.path[0] = str(ROOT)  # the directory is started by its path, and its modules are bench.gpu's

from bench.gpu.nvml import find_gpu  # noqa: E402
from bench.gpu.results import Entry, Results, table  # noqa: E402
from bench.gpu.schedule import STEPS, Step, fitting  # noqa: E402
from bench.gpu.scheduler import Scheduler  # noqa: E402


def main() -> None:
    """Run the schedule, and print its table."""
    options = parse_options()
    gpu = None if options.dry else find_gpu()
    if gpu is None and not options.dry:
        sys.exit("error: NVIDIA's driver finds no GPU here\nhint: --dry runs the steps on a CPU")
    seconds = 60 * options.minutes
    steps = find_steps(options.only)
    if options.dry:  # what fits on a GPU, however busy this machine's CPU is
        steps = fitting(((step, step.seconds) for step in steps), seconds)
        steps = [replace(s, seconds=SLOW * s.seconds, ready=SLOW * s.ready) for s in steps]
        seconds *= SLOW
    entries = [Entry(step=step) for step in steps]
    machine = "a CPU, dry" if gpu is None else f"{gpu.name}, driver {gpu.driver}"
    results = Results(
        options.out.resolve(), entries, machine=machine, dry=options.dry, minutes=options.minutes
    )
    print(f"{options.minutes:g} minutes on {machine}: {len(steps)} steps", flush=True)
    for number in SIGNALS:
        signal.signal(number, stop)
    cores = len(os.sched_getaffinity(0))
    with starting(dry=options.dry):
        Scheduler(entries, results, seconds=seconds, cores=cores, gpu=gpu, dry=options.dry).run()
    print("\n" + "\n".join(table(entries)), flush=True)
    sys.exit(1 if any(entry.status == "failed" for entry in entries) else 0)


def stop(*_: object) -> None:
    """Raise KeyboardInterrupt at the first signal; later ones change nothing."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="bench/gpu", description="A quarter of an hour on a GPU.")
    parser.add_argument("what", choices=("quarter",))
    parser.add_argument("--minutes", type=float, default=15.0, help="for all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names of steps")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at the smallest size")
    return parser.parse_args()


def find_steps(only: Sequence[str] | None) -> list[Step]:
    """Return the steps, or those that are named; exits at an unknown name."""
    names = [step.name for step in STEPS]
    if unknown := sorted(set(only or ()) - set(names)):
        sys.exit(f"error: there is no step {unknown}\nhint: one of {names}")
    return [step for step in STEPS if only is None or step.name in only]


def starting(*, dry: bool) -> contextlib.AbstractContextManager[None]:
    """Return what lets a dry run fork its processes, from one that has torch; else nothing.

    Starting two dozen interpreters with torch would take most of its time.
    """
    if not dry:
        return contextlib.nullcontext()
    from tests.support.infra.launch.fork_server import installed

    return installed(every=True)


if __name__ == "__main__":
    main()
