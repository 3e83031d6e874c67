"""Two processes want the same artifact at the same moment: it is made once, and whole.

Real processes, stores and workers: a few races of each kind here, hundreds in tests/campaigns.
"""

from pathlib import Path

import pytest

from tests.support.reliability.races import HOMES, check, open_track, run_races, url_of

FEW = 2


@pytest.mark.parametrize(
    ("kind", "homes"),
    [("directory", "two machines"), ("directory", "one machine"), ("s3", "two machines")],
)
def test_an_artifact_that_two_want_at_once_is_made_once(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, homes: str
) -> None:
    with open_track(tmp_path, url_of(kind, request), HOMES[homes]) as track:
        check(run_races(track, FEW, seed=1))


def test_without_leases_work_is_done_twice_and_one_artifact_wins(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    with open_track(tmp_path, store, ("one", "two"), without=("NO_LEASE",)) as track:
        outcome = track.race(0, delay=0.0)
    assert (len(outcome.bodies), outcome.wrong()) == (2, None)


def test_without_put_if_absent_either_racer_has_an_artifact_of_its_own(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    without = ("NO_LEASE", "PLAIN_PUT")
    with open_track(tmp_path, store, ("one", "two"), without=without) as track:
        assert track.race(0, delay=0.0).wrong() == "two artifacts"
