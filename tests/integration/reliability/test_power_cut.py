"""Power is cut while artifacts are committed: a few times here, a thousand in tests/campaigns."""

import pytest

from tests.support.reliability.power_cut import Fsync, cut_power, needs_power

pytestmark = needs_power


def test_what_was_acknowledged_survives_a_power_cut() -> None:
    report = cut_power(cuts=20, seed=1)
    assert report.faults == []
    assert report.acknowledged > 3, "too slow a machine to say anything"


def test_a_single_object_that_was_acknowledged_survives_a_power_cut() -> None:
    assert cut_power(cuts=10, seed=1, objects=True).faults == []


def test_without_flushing_directories_a_power_cut_loses_objects() -> None:
    """A whole commit would not show it: what it flushes later takes the names along on ext4."""
    report = cut_power(cuts=12, seed=1, fsync="files", objects=True)
    assert any(": lost" in fault for fault in report.faults)


@pytest.mark.parametrize("fsync", ["none", "directories"])
def test_without_flushing_files_a_power_cut_loses_artifacts(fsync: Fsync) -> None:
    """The cut is a real one: it finds out a store that does not flush.

    Where directories are flushed and files are not, an empty lease may be all that is left.
    """
    report = cut_power(cuts=5, seed=1, fsync=fsync)
    assert any(w in fault for fault in report.faults for w in (": lost", ": torn", ": stuck"))
