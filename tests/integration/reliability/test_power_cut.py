"""Power is cut while artifacts are committed: a few times here, a thousand in tests/campaigns."""

from tests.support.reliability.power_cut import cut_power, flush_nothing, needs_power

pytestmark = needs_power


def test_what_was_acknowledged_survives_a_power_cut() -> None:
    report = cut_power(cuts=20, seed=1)
    assert report.faults == []
    assert report.acknowledged > 3, "too slow a machine to say anything"


def test_without_flushing_a_power_cut_loses_artifacts() -> None:
    """The cut is a real one: it finds out a store that does not flush."""
    report = cut_power(cuts=5, seed=1, before=flush_nothing)
    assert any(w in fault for fault in report.faults for w in (": lost", ": torn", ": stuck"))
