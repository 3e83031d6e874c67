"""A process that builds toy stages, to be raced, stopped, killed or kept from its store.

    python -m tests.support.flows.builder_process ROOT HOME STORE TIMINGS [ORDER]

ROOT is the repository of a `Toys`, TIMINGS are the fields of LeaseTimings as JSON. Without ORDER it
reads one from each line of its input. Prints each event as a line of JSON, at the end of each build
{"kind": "end"} with the name of the error, if any, and what it believes to be the artifact.
Everything is the product's own, the workers too. Taken out for controls, by environment variable:
NO_FENCE (any lease passes for its own), NO_LEASE (each process has one of its own), PLAIN_PUT (a
manifest is written over another's).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.building.build import build
from flows.building.context import BuildContext
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from flows.leases.held_lease import HeldLease, LeaseTimings
from flows.stages import Stage
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.errors import NanochatError
from tests.support.flows.fixtures import Toys

REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to build, and when."""

    stage: str
    seed: int | None = None  # of the run, which makes the fingerprint; None: that of the toys
    start: float = 0.0  # time.monotonic(), which all processes of a machine share


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


def toy(name: str) -> Stage:
    """Return the stage that such a process builds; `toys.stage(name, ...)` makes its module."""
    entry = f"tasks.toy_{name}"
    return Stage(name=name, makes="a toy", inputs=(), config=("seed",), entry=entry, compute="cpu")


def slow() -> Stage:
    """Return the stage of SLOW."""
    return toy("slow")


def start_process(
    toys: Toys,
    home: Path,
    store: str,
    timings: LeaseTimings,
    *orders: Order,
    without: Sequence[str] = (),
    inside: Sequence[str] = (),
) -> "subprocess.Popen[str]":
    """Start such a process; `inside` is a command that runs it elsewhere."""
    words = [toys.root, home, store, json.dumps(asdict(timings)), *map(to_line, orders)]
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "tests.support.flows.builder_process", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **dict.fromkeys(without, "1")},
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL if orders else subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def to_line(order: Order) -> str:
    """Return an order as the process reads it."""
    return json.dumps(asdict(order))


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
    """Start a process that builds SLOW once."""
    toys.stage("slow", source=SLOW)
    timings = LeaseTimings(ttl=ttl, beat=beat, poll=0.1, max_poll=0.5)
    without = () if check_lease else ("NO_FENCE",)
    order = Order(stage="slow")
    return start_process(toys, home, store, timings, order, without=without, inside=inside)


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


class _PlainPut:
    """A store that writes manifests over whatever is there."""

    def __init__(self, store: Store, notes: Path) -> None:
        self._store, self._notes = store, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if not key.endswith("/manifest.json"):
            return self._store.put_if_absent(key, data)
        note = f"manifest-{key.replace('/', '-')}"
        (self._notes / f"{note}-{os.getpid()}").touch()
        while len(list(self._notes.glob(f"{note}-*"))) < 2:  # both have looked, and found none
            time.sleep(0.01)
        self._store.put(key, data)
        return True


def main() -> None:
    """Build what is ordered."""
    root, home, url, timings, *orders = sys.argv[1:]
    if "NO_FENCE" in os.environ:
        HeldLease._is_of = lambda self, record: True
    if "NO_LEASE" in os.environ:
        key = property(lambda ref: f"{ref.prefix}/lease-{os.getpid()}.json")
        setattr(ArtifactRef, "lease_key", key)  # noqa: B010 - it has no setter
    store: Any = open_store(url)
    if "PLAIN_PUT" in os.environ:
        store = _PlainPut(store, Path(home).parent)
    name = Path(home).name if orders else os.getpid()  # racers may share a home
    context = replace(
        Toys(root=Path(root), home=Path(home)).context(f"run-{name}"),
        store=store,
        terms=LeaseTimings(**json.loads(timings)),
        watch=lambda stage, event: _tell(**event),
    )
    for line in orders or sys.stdin:
        _carry_out(Order(**json.loads(line)), context)


def _carry_out(order: Order, context: BuildContext) -> None:
    if order.seed is not None:
        context = replace(context, run=replace(context.run, seed=order.seed))
    time.sleep(max(0.0, order.start - time.monotonic()))
    try:
        built = build(toy(order.stage), context, {}, force=False)
    except NanochatError as error:
        _tell(kind="end", error=type(error).__name__, text=str(error))
    else:
        manifest = json.loads(built.manifest.to_json())
        _tell(kind="end", error=None, cached=built.cached, manifest=manifest)


if __name__ == "__main__":
    main()
