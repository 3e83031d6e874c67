"""A process that builds a toy stage, to be stopped, killed or kept from its store.

    python -m tests.support.flows.builder_process ROOT HOME STORE TIMINGS

ROOT is the repository of a `Toys`, TIMINGS are the fields of LeaseTimings as JSON. Prints each
event as a line of JSON, at the end {"kind": "end"} with the name of the error, if any. Everything
is the product's own, the workers too.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flows.building.build import build
from flows.leases import lease
from flows.leases.held_lease import LeaseTimings
from flows.stages import Stage
from infra.storage.open import open_store
from nanochat_core.errors import NanochatError
from tests.support.flows.fixtures import Toys

REPOSITORY = Path(__file__).parents[3]

# Notes that its body runs in a file next to the homes; ends when there is a file `go`.
SLOW = """
import time
from nanochat_core.runtime.progress import Progress


def run(job):
    shared = job.directory.parents[3]
    with (shared / "bodies").open("a") as file:
        file.write(job.directory.parents[2].name + "\\n")
    progress = Progress(job.events)
    progress.start(900)
    progress.step(310)
    while not (shared / "go").exists():
        time.sleep(0.02)
    (job.output / "value.txt").write_text("slow")
    return {}
"""


def slow() -> Stage:
    """Return the stage of SLOW; `toys.stage("slow", ...)` makes its module."""
    entry = "tasks.toy_slow"
    return Stage(
        name="slow", makes="a toy", inputs=(), config=("seed",), entry=entry, compute="cpu"
    )


def start_builder(
    toys: Toys,
    home: Path,
    store: str,
    *,
    ttl: float = lease.TTL,
    beat: float = lease.BEAT,
    inside: tuple[str, ...] = (),
) -> "subprocess.Popen[str]":
    """Start a process that builds SLOW once; `inside` is a command that runs it elsewhere."""
    toys.stage("slow", source=SLOW)
    timings = asdict(LeaseTimings(ttl=ttl, beat=beat, poll=0.1, max_poll=0.5))
    words = [str(toys.root), str(home), store, json.dumps(timings)]
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "tests.support.flows.builder_process", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )


def bodies(toys: Toys) -> list[str]:
    """Return the homes in which the stage's body ran."""
    path = toys.home.parent / "bodies"
    return path.read_text().split() if path.exists() else []


def read_until(process: "subprocess.Popen[str]", kind: str) -> list[dict[str, Any]]:
    """Its events up to the next one of this kind."""
    events: list[dict[str, Any]] = []
    assert process.stdout
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["kind"] == kind:
            return events
    raise AssertionError(f"it ended without '{kind}': {events}")


def _print_event(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Build the stage."""
    root, home, url, timings = sys.argv[1:]
    context = replace(
        Toys(root=Path(root), home=Path(home)).context(f"run-{Path(home).name}"),
        store=open_store(url),
        terms=LeaseTimings(**json.loads(timings)),
        watch=lambda stage, event: _print_event(**event),
    )
    try:
        built = build(slow(), context, {}, force=False)
    except NanochatError as error:
        _print_event(kind="end", error=type(error).__name__, text=str(error))
    else:
        _print_event(kind="end", error=None, cached=built.cached)


if __name__ == "__main__":
    main()
