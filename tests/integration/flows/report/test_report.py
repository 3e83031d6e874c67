"""The page of a run of thousands of steps."""

from tests.support.flows.reported import make_report


def test_a_long_run_still_makes_a_small_page(tmp_path):
    page, _ = make_report(tmp_path, num_steps=3_000)
    assert len(page) < 300_000
