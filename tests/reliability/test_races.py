"""Two processes want the same artifact at the same moment: it is made once, and whole.

Real processes, stores and workers, race after race. A few of each kind here, more in the campaign;
what the last one gave is in docs/reliability.md:

    NANOCHAT_TRIALS=200 .venv/bin/pytest -q -rP -m slow tests/reliability/test_races.py
"""

import contextlib
import os
import random
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.artifacts.publish import find_manifest
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from infra.storage.base import Store
from infra.storage.files import sha256_of
from infra.storage.open import open_store
from tests.conftest import BUCKET
from tests.flows.conftest import Toys
from tests.reliability.racer import SOURCE, STAGE, Finish, Race, Racer, fingerprint_of

TRIALS = int(os.environ.get("NANOCHAT_TRIALS", "200"))
FEW = 4
SECONDS_TO_GET_READY = 0.05
HOMES = {"two machines": ("one", "two"), "one machine": ("one", "one")}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one race came to."""

    finishes: tuple[Finish, Finish]
    canonical: Manifest | None
    bodies: tuple[str, ...]  # marks of the executions
    marks: tuple[str, ...]  # what the artifact's files hold: one mark, if it is of one piece

    def wrong(self) -> str | None:
        """What must not be, whatever happened; None when all is well."""
        if errors := [finish.error for finish in self.finishes if finish.error]:
            return f"failed: {errors}"
        if self.canonical is None:
            return "no artifact"
        own = [finish.manifest for finish in self.finishes]
        if own[0] != own[1]:
            return "two artifacts"
        if self.canonical.files[0].key != own[0]["files"][0]["key"]:  # type: ignore[index]
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
        self.toys.stage(STAGE.name, source=SOURCE)
        self.directory = directory
        self.store = open_store(store)
        for home in set(homes):
            (directory / home).mkdir()
        self.racers = [Racer(self.toys, directory / home, store, without=without) for home in homes]

    def race(self, seed: int, *, delay: float) -> Outcome:
        """One race, in which the second starts `delay` seconds after the first."""
        start = time.monotonic() + SECONDS_TO_GET_READY
        for racer, moment in zip(self.racers, (start, start + delay), strict=True):
            racer.send(Race(seed=seed, start=moment))
        first, second = (racer.hear() for racer in self.racers)
        canonical = find_manifest(
            self.store, ArtifactRef(STAGE.name, fingerprint_of(self.toys, seed))
        )
        return Outcome(
            finishes=(first, second),
            canonical=canonical,
            bodies=tuple((self.directory / f"bodies-{seed}").read_text().split()),
            marks=tuple(marks_of(self.store, canonical, self.directory)) if canonical else (),
        )

    def close(self) -> None:
        for racer in self.racers:
            racer.close()


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


def run_races(track: Track, count: int) -> list[Outcome]:
    """Most start at once; in the others the second comes while the first is under way."""
    rng = random.Random(1)
    delays = [rng.choice((0.0, 0.0, 0.005, 0.05, 0.5)) * rng.random() for _ in range(count)]
    return [track.race(seed, delay=delay) for seed, delay in enumerate(delays)]


def assert_made_once(outcomes: list[Outcome]) -> None:
    wrong = [what for outcome in outcomes if (what := outcome.wrong())]
    once = sum(len(outcome.bodies) == 1 for outcome in outcomes)
    print(f"made once in {once} of {len(outcomes)} races, wrong in {len(wrong)}")  # noqa: T201
    assert wrong == []
    assert once >= 0.95 * len(outcomes), f"made once in {once} of {len(outcomes)} races"


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where an empty store is; the environment is that of its client."""
    if request.param == "directory":
        return (tmp_path / "store").as_uri()
    request.getfixturevalue("s3_store")
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
def test_an_artifact_that_two_want_at_once_is_made_once(
    tmp_path: Path, store: str, homes: tuple[str, str]
):
    with open_track(tmp_path, store, homes) as track:
        assert_made_once(run_races(track, FEW))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("homes", HOMES.values(), ids=HOMES)
def test_two_hundred_artifacts_that_two_want_at_once_are_made_once(
    tmp_path: Path, store: str, homes: tuple[str, str]
):
    with open_track(tmp_path, store, homes) as track:
        assert_made_once(run_races(track, TRIALS))


def test_without_leases_work_is_done_twice_and_one_artifact_wins(tmp_path: Path):
    store = (tmp_path / "store").as_uri()
    with open_track(tmp_path, store, ("one", "two"), without=("NO_LEASE",)) as track:
        outcomes = [track.race(seed, delay=0.0) for seed in range(3)]
    assert max(len(outcome.bodies) for outcome in outcomes) == 2
    assert [outcome.wrong() for outcome in outcomes if outcome.wrong()] == []


def test_without_put_if_absent_either_racer_has_an_artifact_of_its_own(tmp_path: Path):
    store = (tmp_path / "store").as_uri()
    without = ("NO_LEASE", "PLAIN_PUT")
    with open_track(tmp_path, store, ("one", "two"), without=without) as track:
        outcomes = [track.race(seed, delay=0.0) for seed in range(3)]
    assert "two artifacts" in [outcome.wrong() for outcome in outcomes]
