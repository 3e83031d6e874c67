"""kill -9 of midtraining, SFT and RL at any moment: they resume, and end with the same bytes.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills.

It is the campaign of test_kill_training.py on jobs of the chat stages: the files a job leaves (for
RL, samples of its answers too), and all that any attempt reported, must be those of an undisturbed
job. RL is rewarded only while some answers are right and others wrong, which the report counts.
"""

from pathlib import Path
from typing import Any

import pytest

from flows.stages import CHAT_MODELS
from nanochat_core.job import Job
from tests.campaigns.reliability.test_kill_training import land_kills
from tests.support.campaigns import Campaign
from tests.support.nanochat_core.train.fixtures import Bench
from tests.support.reliability.small_training import reported

pytestmark = pytest.mark.torch

# Few sums: SFT knows some by heart and others not, so that RL has something to learn from.
DATA = {"datasets": [{"name": "arithmetic", "grade": 1, "num_train": 12, "num_test": 6}]}
SUMS: dict[str, Any] = {"mixture": [{"task": "arithmetic", "num_examples": None, "epochs": 1}]}
SUMS |= {"total_batch_size": 512, "lr_fraction": 0.5}
RL = {"num_steps": 40, "examples_per_step": 4, "samples_per_example": 6, "max_new_tokens": 16}
SECTIONS: dict[str, dict[str, Any]] = {
    "midtrain": {"num_epochs": 20, "total_batch_size": 512},
    "sft": {**SUMS, "num_epochs": 60},
    "rl": {**RL, "lr_fraction": 0.02, "eval_examples": 6},
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [stage.name for stage in CHAT_MODELS])
def test_kills_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, stage: str, campaign: Campaign
) -> None:
    inputs: dict[str, Path] = {}
    if stage == "rl":
        bench = Bench(tmp_path_factory, tmp_path)
        inputs["task_data"] = bench.done("task_data", "sums", section=DATA)[0].output
        sft, _ = bench.done("sft", "knows-some", inputs=inputs, section=SECTIONS["sft"])
        inputs["sft"] = sft.output

    def make(directory: Path) -> Job:
        bench = Bench(tmp_path_factory, directory.parent)
        resources = {"save_every_steps": 5, "eval_every_steps": 20}
        job = bench.job(stage, directory.name, inputs=inputs, section=SECTIONS[stage], **resources)
        job.write()
        return job

    kills = campaign.trials(5)
    _, faults = land_kills(make, tmp_path, kills=kills, ranks=1, seed=campaign.seed)
    undisturbed = Job.read(tmp_path / "undisturbed" / "job.json")
    steps = [values[0] for (kind, _), values in reported(undisturbed).items() if kind == "step"]
    learning = sum(values.get("useful_share", 1.0) > 0 for values in steps)
    campaign.found(f"{kills} kills, {learning} of {len(steps)} steps learn")
    assert faults == []
    assert learning > len(steps) / 2
