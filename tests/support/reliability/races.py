"""Two processes want the same artifact at the same moment, race after race."""

import contextlib
import random
import time
import uuid
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.artifacts.publish import find_manifest
from flows.identity.fingerprint import Code, identify
from flows.identity.manifest import Manifest
from flows.leases.held_lease import LeaseTimings
from infra.storage.files import sha256_of
from infra.storage.open import open_store
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

    def race(self, seed: int, *, delay: float = 0.0) -> tuple[int, str]:
        """Run a race, in which the second starts `delay` seconds after the first.

        Return how often the body ran, and what must not be whatever happened, "" when all is well.
        """
        start = time.monotonic() + SECONDS_TO_GET_READY
        for racer, moment in zip(self.racers, (start, start + delay), strict=True):
            assert racer.stdin
            racer.stdin.write(f"{to_line(Order(stage=STAGE, seed=seed, start=moment))}\n")
            racer.stdin.flush()
        finishes = [read_until(racer, "end")[-1] for racer in self.racers]
        run = replace(self.toys.context().run, seed=seed)
        ref = identify(toy(STAGE), run, {}, code=Code(self.toys.root)).ref
        bodies = (self.directory / f"bodies-{seed}").read_text().split()
        return len(bodies), self._wrong(finishes, find_manifest(self.store, ref), bodies)

    def _wrong(
        self, finishes: list[dict[str, Any]], canonical: Manifest | None, bodies: list[str]
    ) -> str:
        if errors := [f"{f['error']}: {f['text']}" for f in finishes if f["error"]]:
            return f"failed: {errors}"
        if canonical is None:
            return "no artifact"
        own = [finish["manifest"] for finish in finishes]
        if own[0] != own[1]:
            return "two artifacts"
        if canonical.files[0].key != own[0]["files"][0]["key"]:
            return "another artifact than the racers say"
        marks: set[str] = set()  # of the files: one, if they are of one piece
        for file in canonical.files:
            path = self.directory / f"fetched-{uuid.uuid4().hex}"
            self.store.fetch(file.key, path, size=file.size)
            is_whole = path.stat().st_size == file.size and sha256_of(path) == file.sha256
            marks.add(path.read_text()[:16] if is_whole else "torn")
        is_one = len(marks) == 1 and marks <= set(bodies)
        return "" if is_one else f"an artifact of several pieces: {marks}"


@contextlib.contextmanager
def open_track(
    directory: Path, store: str, homes: tuple[str, str], *, without: tuple[str, ...] = ()
) -> Generator[Track]:
    """Start two racers in these homes; end them."""
    track = Track(directory, store, homes, without=without)
    try:
        yield track
    finally:
        for racer in track.racers:
            racer.communicate(timeout=120)


def run_races(track: Track, count: int, *, seed: int) -> int:
    """Run races, all of which must be well; return in how many the body ran once: nearly all.

    Most start at once; in the others the second comes while the first is under way.
    """
    rng = random.Random(seed)
    delays = [rng.choice((0.0, 0.0, 0.005, 0.05, 0.5)) * rng.random() for _ in range(count)]
    found = [track.race(number, delay=delay) for number, delay in enumerate(delays)]
    assert [wrong for _, wrong in found if wrong] == []
    once = sum(bodies == 1 for bodies, _ in found)
    assert once >= 0.95 * count, f"made once in {once} of {count} races"
    return once
