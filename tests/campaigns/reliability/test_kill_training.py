"""kill -9 of a training job, fifty times: it resumes and ends with the same bytes.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills.
"""

from pathlib import Path

import numpy as np
import pytest

from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.data.row_files import Rows
from tests.integration.reliability.test_kill_training import ignore, kill_pretraining
from tests.support.campaigns import Campaign
from tests.support.reliability import small_training
from tests.support.reliability.small_training import make_inputs, make_job, reported

pytestmark = pytest.mark.torch


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_change_nothing(tmp_path: Path, ranks: int, campaign: Campaign) -> None:
    kills = campaign.trials(8)
    report = kill_pretraining(tmp_path, kills=kills, ranks=ranks, seed=campaign.seed)
    campaign.found(f"{report['kills']} kills, {report['kills_in_a_row']} of them in a row")
    assert report["kills"] >= kills
    assert report["faults"] == []


def test_two_ranks_then_one_then_four_train_the_same(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs")
    whole = make_job(tmp_path / "whole", inputs, num_steps=15)
    run_job(whole, processes=1, on_event=ignore)
    parts = make_job(tmp_path / "parts", inputs, num_steps=15)
    for ranks in (2, 1):
        with pytest.raises(StageInterrupted):
            run_job(parts, processes=ranks, on_event=ignore, steps=5)
    run_job(parts, processes=4, on_event=ignore)
    expected, actual = reported(whole), reported(parts)
    assert actual.keys() == expected.keys()
    for place, values in expected.items():
        assert actual[place][-1] == pytest.approx(values[-1], rel=1e-5), place
    rows = Rows.open(inputs["rows"], "train")
    for step in range(15):
        ids = rows.step_ids(step, small_training.ROWS_PER_STEP, 3)
        for size in (1, 2, 4):
            shares = [
                rows.batch(step, small_training.ROWS_PER_STEP, seed=3, rank=rank, world=size)
                for rank in range(size)
            ]
            together = np.empty_like(rows.take(ids))
            for rank, share in enumerate(shares):
                together[rank::size] = share
            assert (together == rows.take(ids)).all()
