"""Two processes want the same artifact at the same moment: it is made once, and whole.

Real processes and workers: a few races for a directory here; hundreds, also for S3, in
tests/campaigns. Of S3 test_simulation.py covers the conditional requests that decide a race.
"""

from pathlib import Path

import pytest

from tests.support.reliability.races import HOMES, open_track, run_races

FEW = 2


@pytest.mark.parametrize("homes", ["two machines", "one machine"])
def test_an_artifact_that_two_want_at_once_is_made_once(tmp_path: Path, homes: str) -> None:
    with open_track(tmp_path, (tmp_path / "store").as_uri(), HOMES[homes]) as track:
        run_races(track, FEW, seed=1)


def test_without_leases_work_is_done_twice_and_one_artifact_wins(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with open_track(tmp_path, store, ("one", "two"), without=("NO_LEASE",)) as track:
        assert track.race(0) == (2, "")


def test_without_put_if_absent_either_racer_has_an_artifact_of_its_own(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    without = ("NO_LEASE", "PLAIN_PUT")
    with open_track(tmp_path, store, ("one", "two"), without=without) as track:
        assert track.race(0)[1] == "two artifacts"
