"""A process that builds toy artifacts against another one, race after race.

    python -m tests.support.reliability.racer ROOT HOME STORE

ROOT is the repository of a `Toys` with a stage `contested`. Reads one line of JSON for each race:
the seed that makes its fingerprint, and the moment at which to start. Answers with what was built.
Everything is the product's own, the workers too; only the times around leases are shorter. Taken
out for controls, by environment variable: NO_LEASE (each racer has one of its own, and its
job waits for the other's), PLAIN_PUT (a manifest is written over another's).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.building.build import build
from flows.identity.fingerprint import Code, identify
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import LeaseTimings
from flows.stages import Stage
from infra.storage.base import Store
from infra.storage.open import open_store
from nanochat_core.errors import NanochatError
from tests.support.flows.fixtures import Toys

REPOSITORY = Path(__file__).parents[3]
TERMS = LeaseTimings(ttl=20.0, beat=2.0, poll=0.02, max_poll=0.1)
STAGE = Stage(
    name="contested",
    makes="a toy",
    inputs=(),
    config=("seed",),
    entry="tasks.toy_contested",
    compute="cpu",
)

# Every execution makes other files, all marked alike, and notes its mark beside the homes.
SOURCE = """
import os
import time


def run(job):
    bodies = job.directory.parents[3] / f"bodies-{job.config['seed']}"
    mark = os.urandom(8).hex()
    with bodies.open("a") as file:
        file.write(mark + "\\n")
    while "NO_LEASE" in os.environ and len(bodies.read_text().split()) < 2:
        time.sleep(0.01)  # without leases the other one does it too
    for name in ("one", "two", "three"):
        (job.output / name).write_text(mark * 2000)
    return {"mark": mark}
"""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How one racer came in."""

    error: str | None
    cached: bool
    manifest: dict[str, Any] | None  # what it believes to be the artifact


@dataclass(frozen=True, kw_only=True)
class Race:
    """Orders a racer what to build and when."""

    seed: int
    start: float  # time.monotonic(), which all processes of a machine share


class Racer:
    """Such a process, as the test sees it."""

    def __init__(self, toys: Toys, home: Path, store: str, *, without: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.reliability.racer"),
                *(str(toys.root), str(home), store),
            ],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **dict.fromkeys(without, "1")},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, race: Race) -> None:
        """It starts at the race's moment."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asdict(race)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Finish:
        """Wait until it has come in."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "a racer died"
        return Finish(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=120)


def fingerprint_of(toys: Toys, seed: int) -> str:
    """What is raced for."""
    run = replace(toys.context().run, seed=seed)
    return identify(STAGE, run, {}, code=Code(toys.root)).fingerprint


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
    """Race until there are no more races."""
    root, home, url = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if "NO_LEASE" in os.environ:
        key = property(lambda ref: f"{ref.prefix}/lease-{os.getpid()}.json")
        setattr(ArtifactRef, "lease_key", key)  # noqa: B010 - it has no setter
    store: Any = open_store(url)
    if "PLAIN_PUT" in os.environ:
        store = _PlainPut(store, home.parent)
    toys = Toys(root=root, home=home)
    context = replace(toys.context(f"run-{os.getpid()}"), store=store, terms=TERMS)
    for line in sys.stdin:
        race = Race(**json.loads(line))
        finish = _race(race, lambda seed: replace(context, run=replace(context.run, seed=seed)))
        sys.stdout.write(json.dumps(asdict(finish)) + "\n")
        sys.stdout.flush()


def _race(race: Race, context_of: Callable[[int], Any]) -> Finish:
    context = context_of(race.seed)
    time.sleep(max(0.0, race.start - time.monotonic()))
    try:
        built = build(STAGE, context, {}, force=False)
    except NanochatError as error:
        return Finish(error=f"{type(error).__name__}: {error}", cached=False, manifest=None)
    return Finish(error=None, cached=built.cached, manifest=_tree(built.manifest))


def _tree(manifest: Manifest) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(manifest.to_json())
    return tree


if __name__ == "__main__":
    main()
