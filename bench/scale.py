"""What a large store and many runs cost: seconds of commands, and the size of Prefect's database.

    python -m bench.scale [--artifacts 20000] [--runs 1000] [--rounds 3] [--prefect-runs 10]

The store is a directory of artifacts of all stages of `tiny`, published and recorded by the
product's own functions, two days ago by their times. Each command is a process of its own, its
start included; of the rounds the best counts, but `gc` is shown for its first and its second time.

Prefect's database is that of a new home's server. Toy stages with the names and inputs of `tiny`'s,
four of which train for STEPS steps, are run by the product's flow; the size of the database for
--runs runs is extrapolated from the growth by --prefect-runs runs, after one that is not counted.
"""

import argparse
import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flows.artifacts.runs import Run, new_run_id, timestamp, write_run
from flows.gc.collect import make_claim
from flows.identity.fingerprint import REPOSITORY, Code
from flows.leases.held_lease import HeldLease, try_acquire
from flows.profiles import open_profile
from flows.stages import STAGES, Stage
from infra.prefect.server import client_environment, stop_server
from infra.storage.local import LocalStore
from tests.support.flows.fixtures import ENTRY, Toys
from tests.support.flows.house import build, make_run
from tests.support.infra.prefect_server import ensure_server

PROFILE = "tiny"
AGE = 2 * 86400.0  # seconds; younger objects are never garbage
HOUR = 3600.0
TRAINING = ("pretrain", "midtrain", "sft", "rl")
STEPS = 600
SECONDS_QUIET = 10.0
TRAINS = (
    ENTRY.replace("start(2)", f"start({STEPS})")
    .replace(
        "step(1, loss=0.5)",
        f"step(1, loss=9.0)\n    for i in range(2, {STEPS}):\n        progress.step(i, loss=9 / i)",
    )
    .replace("step(2, loss=0.25)", f"step({STEPS}, loss=0.1)")
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one process took, in seconds."""

    cpu: float
    wall: float


def main() -> None:
    """Fill a store, measure, print a table."""
    parser = argparse.ArgumentParser(description="What commands cost in a large store.")
    parser.add_argument("--artifacts", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefect-runs", type=int, default=10, help="0: not measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as directory:
        home = Path(directory) / "home"
        artifacts = fill(home, options.artifacts, options.runs)
        print(f"{processor()}; {artifacts:,} artifacts, {options.runs:,} runs")
        print(f"{'command':<20} {'CPU s':>7} {'wall s':>7}")
        for name, cost in measure(home, options.rounds):
            print(f"{name:<20} {cost.cpu:>7.2f} {cost.wall:>7.2f}", flush=True)
        if options.prefect_runs:
            begin, growth = measure_prefect(Path(directory) / "toys", options.prefect_runs)
            whole = begin + growth * options.runs
            print(
                f"Prefect's database: {begin / 1e6:.1f} MB after one run, {growth / 1e3:,.0f} KB a "
                f"run (mean of {options.prefect_runs}), so {whole / 1e6:,.0f} MB after "
                f"{options.runs:,} runs (extrapolated, nothing vacuumed)"
            )


def fill(home: Path, artifacts: int, runs: int) -> int:
    """Publish artifacts and record runs in the home's store; return how many artifacts it has."""
    store, code = LocalStore(home / "store"), Code(REPOSITORY)
    recipe = open_profile(PROFILE).run
    count = -(-artifacts // len(STAGES))
    sets: list[dict[str, str]] = []
    home.mkdir()
    fsync, os.fsync = os.fsync, lambda descriptor: None  # a power cut here would be no loss
    try:
        for number in range(count):
            # The last set is of today's seed, so that the plan finds it.
            seed = recipe.seed + count - 1 - number
            built = build(store, home, code, run=dataclasses.replace(recipe, seed=seed))
            sets.append({name: manifest.fingerprint for name, manifest in built.items()})
            for manifest in built.values():  # a builder leaves the record of its lease
                held = try_acquire(store, manifest.ref, make_claim())
                assert isinstance(held, HeldLease)
                held.release()
        for number in range(runs):  # the last sets, several times if there are fewer
            write_run(store, record(number, sets[(number - runs) % count]))
    finally:
        os.fsync = fsync
    written = time.time() - AGE
    for path in filter(Path.is_file, (home / "store").rglob("*")):
        os.utime(path, (written, written))
    return count * len(STAGES)


def record(number: int, stages: dict[str, str]) -> Run:
    """Return the record of a finished run, an hour after the one before."""
    started = timestamp(1.78e9 + number * HOUR)
    return Run(
        run=new_run_id(PROFILE, started),
        name=PROFILE,
        profile=PROFILE,
        depth=None,
        overrides=(),
        status="finished",
        started=started,
        ended=started,
        stages=stages,
    )


def measure(home: Path, rounds: int) -> Iterator[tuple[str, Cost]]:
    """Yield what each command costs."""
    run_command(
        home, "plan", PROFILE, "--gpus", "0", "--exit-code"
    )  # compiles modules and scans code
    for words in (
        ("plan", PROFILE, "--gpus", "0", "--exit-code"),
        ("ls",),
        ("status",),
        ("status", PROFILE),
    ):
        costs = [run_command(home, *words) for _ in range(rounds)]
        yield " ".join(words[:2]), min(costs, key=lambda cost: cost.cpu)
    for time_ in ("first", "second"):
        yield f"gc, {time_} time", run_command(home, "gc")


def run_command(home: Path, *words: str) -> Cost:
    """Run one command in the home, which must end with 0."""
    command = [sys.executable, "-m", "flows.cli.app", *words, "--home", str(home)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NANOCHAT_")}
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if code:
            sys.exit(f"{' '.join(words)} ended with {code}: {output.read().decode()}")
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - began)


def measure_prefect(directory: Path, runs: int) -> tuple[float, float]:
    """Return the bytes of Prefect's database after one run, and its growth by each of `runs`."""
    toys = Toys(root=directory / "root", home=directory / "home")
    (toys.root / "tasks").mkdir(parents=True)
    (toys.root / "tasks" / "__init__.py").touch()
    toys.home.mkdir()
    table: dict[str, Stage] = {}
    for stage in STAGES:
        inputs = [table[source.name] for source in stage.inputs]
        source = TRAINS if stage.name in TRAINING else ENTRY
        table[stage.name] = toys.stage(stage.name, *inputs, source=source)
    server = ensure_server(toys.home)
    try:
        os.environ.update(client_environment(toys.home, server.api_url, console_logs=False))
        run_toys(toys, list(table.values()), 0)
        begin = settled_size(toys.home)
        for number in range(1, runs + 1):
            run_toys(toys, list(table.values()), number)
        return begin, (settled_size(toys.home) - begin) / runs
    finally:
        stop_server(toys.home)


def run_toys(toys: Toys, stages: list[Stage], number: int) -> None:
    """Run all stages as a flow; those of another number are built again."""
    from prefect import flow  # after the environment names the server

    from flows.orchestration.pipeline import run_pipeline

    run_id = new_run_id("toy", timestamp(1.78e9 + number * HOUR))
    context = toys.context(run_id)
    context = dataclasses.replace(context, run=dataclasses.replace(context.run, seed=number))

    @flow(name="toys", flow_run_name=run_id)
    def toy_flow() -> None:
        run_pipeline(stages, context, make_run(run_id))

    toy_flow()


def settled_size(home: Path) -> int:
    """Return the bytes of the database in use once no event arrives any more."""
    size, since = 0, time.monotonic()
    while time.monotonic() - since < SECONDS_QUIET:
        time.sleep(1.0)
        with contextlib.closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database:
            pages, free, each = (
                database.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        if (now := (pages - free) * each) != size:
            size, since = now, time.monotonic()
    return size


def processor() -> str:
    """Return the name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


if __name__ == "__main__":
    main()
