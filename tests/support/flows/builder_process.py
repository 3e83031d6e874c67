"""A process that builds one toy stage, to be stopped, killed or kept from its store.

    python -m tests.support.flows.builder_process ROOT HOME STORE TTL BEAT

ROOT is the repository of a `Toys` with a stage `slow`. Prints each event as a line of JSON, at last
{"kind": "end"} with the name of the error, if any. With the environment variable NO_FENCE any lease
passes for its own: the control for tests that a process which lost its lease changes nothing.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.building.build import build
from flows.leases import lease
from flows.leases.held_lease import HeldLease, LeaseTimings
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
    """The stage that such a process builds; its module is made by `toys.stage("slow", ...)`."""
    return Stage(
        name="slow",
        makes="a toy",
        inputs=(),
        config=("seed",),
        entry="tasks.toy_slow",
        compute="cpu",
    )


def start_builder(
    toys: Toys,
    home: Path,
    store: str,
    *,
    ttl: float = lease.TTL,
    beat: float = lease.BEAT,
    check_lease: bool = True,
    inside: tuple[str, ...] = (),
) -> "subprocess.Popen[str]":
    """Start such a process; `inside` is a command that runs it elsewhere."""
    toys.stage("slow", source=SLOW)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [toys.root, home, store, ttl, beat]
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "tests.support.flows.builder_process", *map(str, words)],
        env=environment if check_lease else {**environment, "NO_FENCE": "1"},
        cwd=REPOSITORY,
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


def _tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Build stage `slow` of the toys."""
    root, home, store = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    ttl, beat = map(float, sys.argv[4:])
    if "NO_FENCE" in os.environ:
        HeldLease._is_of = lambda self, record: True
    toys = Toys(root=root, home=home)
    context = replace(
        toys.context(f"run-{home.name}"),
        store=open_store(store),
        terms=LeaseTimings(ttl=ttl, beat=beat, poll=0.1, max_poll=0.5),
        watch=lambda stage, event: _tell(**event),
    )
    try:
        built = build(slow(), context, {}, force=False)
    except NanochatError as error:
        _tell(kind="end", error=type(error).__name__, text=str(error))
    else:
        _tell(kind="end", error=None, cached=built.cached)


if __name__ == "__main__":
    main()
