"""Two processes want the same artifact at the same moment, race after race."""

import contextlib
import random
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.publish import find_manifest
from flows.identity.fingerprint import Code, identify
from flows.identity.manifest import Manifest
from flows.leases.held_lease import LeaseTimings
from infra.storage.base import Store
from infra.storage.files import sha256_of
from infra.storage.open import open_store
from tests.conftest import BUCKET
from tests.support.flows.builder_process import Order, read_until, start_process, to_line, toy
from tests.support.flows.fixtures import Toys

SECONDS_TO_GET_READY = 0.05
HOMES = {"two machines": ("one", "two"), "one machine": ("one", "one")}
TIMINGS = LeaseTimings(ttl=20.0, beat=2.0, poll=0.02, max_poll=0.1)
STAGE = "contested"
# Every execution makes other files, all marked alike, and notes its mark next to the homes.
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
class Outcome:
    """What one race came to."""

    finishes: tuple[dict[str, Any], ...]  # how each racer came in
    canonical: Manifest | None
    bodies: tuple[str, ...]  # marks of the executions
    marks: tuple[str, ...]  # what the artifact's files hold: one mark, if it is of one piece

    def wrong(self) -> str | None:
        """What must not be, whatever happened; None when all is well."""
        if errors := [f"{f['error']}: {f['text']}" for f in self.finishes if f["error"]]:
            return f"failed: {errors}"
        if self.canonical is None:
            return "no artifact"
        own = [finish["manifest"] for finish in self.finishes]
        if own[0] != own[1]:
            return "two artifacts"
        if self.canonical.files[0].key != own[0]["files"][0]["key"]:
            return "another artifact than the racers say"
        if len(set(self.marks)) != 1 or self.marks[0] not in self.bodies:
            return f"an artifact of several pieces: {self.marks}"
        return None


class Track:
    """Two racers and the store they race for."""

    def __init__(
        self, directory: Path, store: str, homes: tuple[str, str], *, without: tuple[str, ...]
    ) -> None:
        self.toys = Toys(root=directory / "root", home=directory / homes[0])
        (self.toys.root / "tasks").mkdir(parents=True)
        (self.toys.root / "tasks" / "__init__.py").touch()
        self.toys.stage(STAGE, source=SOURCE)
        self.directory = directory
        self.store = open_store(store)
        for home in set(homes):
            (directory / home).mkdir()
        self.racers = [
            start_process(self.toys, directory / home, store, TIMINGS, without=without)
            for home in homes
        ]

    def race(self, seed: int, *, delay: float) -> Outcome:
        """One race, in which the second starts `delay` seconds after the first."""
        start = time.monotonic() + SECONDS_TO_GET_READY
        for racer, moment in zip(self.racers, (start, start + delay), strict=True):
            assert racer.stdin
            racer.stdin.write(f"{to_line(Order(stage=STAGE, seed=seed, start=moment))}\n")
            racer.stdin.flush()
        finishes = tuple(read_until(racer, "end")[-1] for racer in self.racers)
        run = replace(self.toys.context().run, seed=seed)
        ref = identify(toy(STAGE), run, {}, code=Code(self.toys.root)).ref
        canonical = find_manifest(self.store, ref)
        return Outcome(
            finishes=finishes,
            canonical=canonical,
            bodies=tuple((self.directory / f"bodies-{seed}").read_text().split()),
            marks=tuple(marks_of(self.store, canonical, self.directory)) if canonical else (),
        )

    def close(self) -> None:
        """End the racers."""
        for racer in self.racers:
            racer.communicate(timeout=120)


def marks_of(store: Store, manifest: Manifest, scratch: Path) -> Generator[str]:
    """The mark in each file; "torn" for one that is not what the manifest says."""
    for file in manifest.files:
        path = scratch / f"fetched-{uuid.uuid4().hex}"
        store.fetch(file.key, path, size=file.size)
        is_whole = path.stat().st_size == file.size and sha256_of(path) == file.sha256
        yield path.read_text()[:16] if is_whole else "torn"


@contextlib.contextmanager
def open_track(
    directory: Path, store: str, homes: tuple[str, str], *, without: tuple[str, ...] = ()
) -> Generator[Track]:
    track = Track(directory, store, homes, without=without)
    try:
        yield track
    finally:
        track.close()


def url_of(kind: str, request: pytest.FixtureRequest) -> str:
    """Return where an empty store is, "directory" or "s3"; the environment is its client's."""
    if kind == "directory":
        return (request.getfixturevalue("tmp_path") / "store").as_uri()
    request.getfixturevalue("s3_store")
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def run_races(track: Track, count: int, *, seed: int) -> list[Outcome]:
    """Most start at once; in the others the second comes while the first is under way."""
    rng = random.Random(seed)
    delays = [rng.choice((0.0, 0.0, 0.005, 0.05, 0.5)) * rng.random() for _ in range(count)]
    return [track.race(number, delay=delay) for number, delay in enumerate(delays)]


def check(outcomes: list[Outcome]) -> None:
    """All is well, and the body ran once in nearly all races."""
    assert [what for outcome in outcomes if (what := outcome.wrong())] == []
    once = made_once(outcomes)
    assert once >= 0.95 * len(outcomes), f"made once in {once} of {len(outcomes)} races"


def made_once(outcomes: list[Outcome]) -> int:
    """Return in how many races the body ran once."""
    return sum(len(outcome.bodies) == 1 for outcome in outcomes)
