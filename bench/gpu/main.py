"""Half an hour on one GPU: `python bench/gpu/main.py PART --budget SECONDS --out DIRECTORY`.

PART is `right` (does it compute the right thing), `train`, `use`, `deep` (what takes long) or
`all`. Every step is a program of its own (steps.py), in a session of its own, with a time limit.
Each result is appended to out/results.jsonl as soon as it is there, so that whatever ends this
early loses nothing. A step that fails is reported with the last lines of its output, and the next
begins; one whose seconds are more than what is left of the budget is skipped. The last thing
printed is a table; if this is stopped, of the steps that had begun. Exit 1: a step failed, or this
was stopped. See README.md beside this file.

`--dry` runs every step on a CPU at depth 2 with tiny shapes, in processes forked from one that has
torch: it shows that the programs run, and measures nothing.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the program is started by its path

from bench.gpu.nvml import find_gpu  # noqa: E402
from bench.gpu.steps import PARTS, Step  # noqa: E402

BUDGET, DRY_BUDGET = 560.0, 300.0  # seconds
# Estimates of what a step takes may be wrong: it is stopped after so many times its seconds.
PATIENCE = 2.0
LAST_LINES = 15  # of a failed step
SECONDS_TO_READ = 10.0  # what a step wrote before it ended
NEEDS_GPU = "needs a GPU"
_LEADERS: set[int] = set()  # the programs that run: they end with this one


@dataclass(kw_only=True)
class Outcome:
    """How a step ended."""

    step: Step
    status: str  # "ok", "failed", "skipped" or NEEDS_GPU
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)  # for people
    why: list[str] = field(default_factory=list)  # it failed or was skipped, or what needs a GPU


class Results:
    """The file of results: whole lines, each on disk before the next step begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.time()
        self._lock = threading.Lock()

    def append(self, **row: Any) -> None:
        """Append a row, with the seconds since the start."""
        line = json.dumps({"at": round(time.time() - self._began, 1), **row})
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    """Run a part's steps, and print the table."""
    options = parse_options()
    gpu = None if options.dry else find_gpu()
    if gpu is None and not options.dry:
        sys.exit("error: NVIDIA's driver finds no GPU here\nhint: --dry runs the steps on a CPU")
    out = options.out.resolve()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    results = Results(out / "results.jsonl")
    machine = "a CPU, dry" if gpu is None else f"{gpu.name}, driver {gpu.driver}"
    results.append(part=options.part, machine=machine, dry=options.dry, budget=options.budget)
    print(f"{options.part} on {machine}, {options.budget:.0f} s", flush=True)
    deadline = time.monotonic() + options.budget
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    steps = find_steps(options.part, options.only)
    run = partial(run_in_time, options=options, out=out, results=results, deadline=deadline)
    # Dry, nothing is measured, so steps may run side by side.
    with starting(dry=options.dry), ThreadPoolExecutor(2 if options.dry else 1) as pool:
        futures = [pool.submit(run, step) for step in steps]
        stopped = False
        try:
            wait(futures)
        except KeyboardInterrupt:
            stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            for leader in list(_LEADERS):
                kill_session(leader)
    outcomes = [future.result() for future in futures if not future.cancelled()]
    print("\n".join(table(outcomes)), flush=True)
    if stopped:
        sys.exit("stopped")
    sys.exit(1 if any(outcome.status == "failed" for outcome in outcomes) else 0)


def starting(*, dry: bool) -> contextlib.AbstractContextManager[None]:
    """Return what lets a dry run fork its processes, from one that has torch; else nothing.

    Starting two dozen interpreters with torch would take most of its time.
    """
    if not dry:
        return contextlib.nullcontext()
    from tests.support.infra.launch.fork_server import installed

    return installed(every=True)


def parse_options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Half an hour on one GPU.")
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--budget", type=float, help="seconds for all steps; 560, dry 300")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at depth 2, tiny shapes")
    options = parser.parse_args()
    options.budget = options.budget or (DRY_BUDGET if options.dry else BUDGET)
    return options


def find_steps(part: str, only: Sequence[str] | None) -> list[Step]:
    """Return the part's steps, or those of them that are named; exits at an unknown name."""
    steps = [s for name, of_part in PARTS.items() if part in (name, "all") for s in of_part]
    names = [step.name for step in steps]
    if unknown := set(only or ()) - set(names):
        sys.exit(f"error: {part} has no step {sorted(unknown)}\nhint: one of {names}")
    return [step for step in steps if only is None or step.name in only]


def run_in_time(
    step: Step, *, options: argparse.Namespace, out: Path, results: Results, deadline: float
) -> Outcome:
    """Run a step, unless too little time is left or its peer is missing; record how it ended."""
    left = deadline - time.monotonic()
    if step.peer is not None and step.peer not in os.environ:
        reason = f"{step.peer} names no checkout of nanochat"
        outcome = Outcome(step=step, status="skipped", why=[reason])
    elif left < (0 if options.dry else step.seconds):
        reason = f"{left:.0f} s are left, it takes {step.seconds}"
        outcome = Outcome(step=step, status="skipped", why=[reason])
    else:
        record = partial(results.append, step=step.name)
        limit = left if options.dry else min(left, PATIENCE * step.seconds)
        outcome = run_step(step, out, record, limit=limit, dry=options.dry)
    results.append(
        step=step.name, status=outcome.status, seconds=round(outcome.seconds, 1), why=outcome.why
    )
    first = f": {outcome.why[0]}" if outcome.why else ""
    print(f"{step.name}: {outcome.status}, {outcome.seconds:.0f} s{first}", flush=True)
    return outcome


def run_step(
    step: Step, out: Path, record: Callable[..., None], *, limit: float, dry: bool
) -> Outcome:
    """Run a step's program for at most `limit` seconds; `record` takes each of its results."""
    outcome = Outcome(step=step, status="ok")
    began = time.monotonic()
    path = out / "logs" / f"{step.name.replace(' ', '-')}.log"
    with path.open("w") as log, tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        process = subprocess.Popen(
            [sys.executable, *step.argv(dry=dry)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=environment(Path(scratch), dry=dry),
            start_new_session=True,
        )
        _LEADERS.add(process.pid)
        reader = threading.Thread(target=read, args=(process, outcome, record), daemon=True)
        reader.start()
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also what a program has left behind: it would take the next one's time and memory.
            kill_session(process.pid)
            process.wait()
            _LEADERS.discard(process.pid)
        reader.join(SECONDS_TO_READ)
    outcome.seconds = time.monotonic() - began
    if code != 0:
        outcome.status = "failed"
        ended = f"took longer than {limit:.0f} s" if code is None else f"ended with {code}"
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        outcome.why = [ended, *lines[-LAST_LINES:]]
    return outcome


def read(process: "subprocess.Popen[str]", outcome: Outcome, record: Callable[..., None]) -> None:
    """Read a program's output until it ends: results for `record`, other lines for the outcome."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            take(line, outcome, record)


def take(line: str, outcome: Outcome, record: Callable[..., None]) -> None:
    """Record a line that is a result; keep any other for the table."""
    row = None
    with contextlib.suppress(ValueError):
        row = json.loads(line)
    if not isinstance(row, dict):
        outcome.lines.append(line.rstrip())
        with contextlib.suppress(OSError):  # a closed stdout loses no result
            print(f"{outcome.step.name}: {line.rstrip()}", flush=True)
        return
    record(result=row)
    if row.get("needs") == "a GPU":
        outcome.status = NEEDS_GPU
        outcome.why.append(row["name"])


def kill_session(leader: int) -> None:
    """Kill every process of the session of process `leader`, whatever group it is in."""
    for pid in session_of(leader):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session_of(leader: int) -> Iterator[int]:
    """Yield the processes of a session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group session: a name may contain spaces and brackets.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                yield int(path.parent.name)


def environment(scratch: Path, *, dry: bool) -> dict[str, str]:
    """Return a step's environment: the repository and `site` importable, caches shared by steps."""
    paths = [str(ROOT), str(ROOT / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    found["TMPDIR"] = str(scratch)
    for name in ("NANOCHAT_DIR", "NANOCHAT_JAN_DIR"):
        if name in found:
            found[name] = str(Path(found[name]).resolve())
    if dry:
        # The last two as bench/train.py sets them: processes can then be forked from one.
        return found | {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "1000",
            "TORCHDYNAMO_DISABLE": "1",
        }
    caches = Path(tempfile.gettempdir()) / "nanochat-bench-gpu"
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "8",  # two sides compile at once
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    return defaults | found


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the lines of the table: each step, what it printed, why it failed."""
    for outcome in outcomes:
        yield ""
        yield f"{outcome.step.name:<16}{outcome.status:<13}{outcome.seconds:>5.0f} s  "
        yield f"    passes: {outcome.step.passes}"
        yield from (f"    {line}" for line in outcome.lines)
        yield from (f"    ! {line}" for line in outcome.why)
    counts = {
        s: sum(o.status == s for o in outcomes) for s in ("ok", NEEDS_GPU, "failed", "skipped")
    }
    yield ""
    yield ", ".join(f"{count} {status}" for status, count in counts.items() if count)


if __name__ == "__main__":
    main()
