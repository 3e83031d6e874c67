"""kill -9 of midtraining, SFT and RL at any moment: they go on, and end with the same bytes.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills.

It is the campaign of test_kill_training.py on jobs of the chat stages: the files a job leaves (for
RL, samples of its answers too), and all that any attempt reported, must be those of an undisturbed
job. RL is paid only while some answers are right and others wrong, which the report counts.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanochat_core.job import Job
from tests.campaigns.reliability.test_kill_training import land_kills
from tests.support.campaigns import Campaign
from tests.support.reliability.small_chat import STAGES, make_chat_inputs, make_chat_job
from tests.support.reliability.small_training import reported

pytestmark = pytest.mark.torch


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
def test_kills_change_nothing(tmp_path: Path, stage: str, campaign: Campaign) -> None:
    kills = campaign.trials(5)
    report = kill_chat_stage(tmp_path, stage, kills=kills, ranks=1, seed=campaign.seed)
    campaign.found(f"{report['kills']} kills, {report['steps_that_learn']} steps that learn")
    assert report["kills"] >= kills
    assert report["faults"] == []
    assert report["steps_that_learn"] > report["steps"] / 2


def kill_chat_stage(
    directory: Path, stage: str, *, kills: int, ranks: int, seed: int
) -> dict[str, Any]:
    """Land so many kills on a chat stage; `faults` of the report must be empty."""
    inputs = make_chat_inputs(directory / "inputs")
    make = partial(make_chat_job, stage=stage, inputs=inputs)
    report = land_kills(make, directory, kills=kills, ranks=ranks, seed=seed)
    undisturbed = Job.read(directory / "undisturbed" / "job.json")
    steps = [values[0] for (kind, _), values in reported(undisturbed).items() if kind == "step"]
    learning = sum(values.get("useful_share", 1.0) > 0 for values in steps)
    return {"stage": stage, **report, "steps": len(steps), "steps_that_learn": learning}
