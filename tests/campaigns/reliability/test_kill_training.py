"""kill -9 of a training job at any moment: it resumes, and ends with the same bytes.

A job is started as the product does, and the whole tree, launcher, torchrun and ranks, is killed at
a random moment, again and again until it ends undisturbed; then another one, until enough kills
have landed. Every file, and every loss, reward and score that any attempt reported, must be those
of an undisturbed job; after each kill every committed checkpoint must be whole.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills. Of
this `make test` has nanochat_core/train/test_resume.py, which stops every stage and compares the
bytes, and bench/test_gpu.py, whose training is killed by SIGKILL and resumes.
"""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.checkpoints import is_whole
from infra.launch.torchrun import run_job
from nanochat_core.job import Job
from tests.support.campaigns import Campaign
from tests.support.flows.waiting import wait_until
from tests.support.nanochat_core.train.fixtures import Bench
from tests.support.reliability.kills import kill_tree, processes_of, values_in

pytestmark = [pytest.mark.torch, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[3]
# Few sums: SFT knows some by heart and others not, so that RL has something to learn from.
DATA = {"datasets": [{"name": "arithmetic", "grade": 1, "num_train": 12, "num_test": 6}]}
SUMS: dict[str, Any] = {"mixture": [{"task": "arithmetic", "num_examples": None, "epochs": 1}]}
SUMS |= {"total_batch_size": 512, "lr_fraction": 0.5}
RL = {"num_steps": 40, "examples_per_step": 4, "samples_per_example": 6, "max_new_tokens": 16}
SECTIONS: dict[str, dict[str, Any]] = {
    "pretrain": {"num_steps": 250, "total_batch_size": 1024},
    "midtrain": {"num_epochs": 20, "total_batch_size": 512},
    "sft": {**SUMS, "num_epochs": 60},
    "rl": {**RL, "lr_fraction": 0.02, "eval_examples": 6},
}


@pytest.mark.parametrize(
    ("stage", "ranks"), [("pretrain", 1), ("pretrain", 2), ("midtrain", 1), ("sft", 1), ("rl", 1)]
)
def test_kills_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    stage: str,
    ranks: int,
    campaign: Campaign,
) -> None:
    bench, inputs = Bench(tmp_path_factory, tmp_path), dict[str, Path]()
    if stage == "rl":
        inputs["task_data"] = bench.done("task_data", "sums", section=DATA)[0].output
        sft, _ = bench.done("sft", "knows-some", inputs=inputs, section=SECTIONS["sft"])
        inputs["sft"] = sft.output

    def make(name: str) -> Job:
        resources = {"save_every_steps": 5, "eval_every_steps": 20}
        job = bench.job(stage, name, inputs=inputs, section=SECTIONS[stage], **resources)
        job.write()
        return job

    undisturbed, moments = make("undisturbed"), random.Random(campaign.seed)
    run_job(undisturbed, processes=ranks, on_event=ignore)
    kills, landed, faults = campaign.trials(6), 0, list[str]()
    while landed < kills:
        job = make(f"after-{landed}-kills")
        while landed < kills and kill_at_random(job, ranks, moments):
            landed += 1
            committed = [commit.parent for commit in job.checkpoints.glob("step-*/COMMIT.json")]
            faults += [f"{each.name} is torn" for each in committed if not is_whole(each)]
            wait_until(
                lambda job=job: not processes_of(job.directory), seconds=120.0, what="orphans"
            )
        run_job(job, processes=ranks, on_event=ignore)
        faults += compare(job, undisturbed)
    reported = values_in(undisturbed.events).items()
    steps = [values[0] for (kind, _), values in reported if kind == "step"]
    learning = sum(values.get("useful_share", 1.0) > 0 for values in steps)
    campaign.found(f"{kills} kills, {learning} of {len(steps)} steps learn")
    assert faults == []
    assert learning > len(steps) / 2  # RL does while some answers are right and others wrong


def ignore(event: dict[str, Any]) -> None:
    """Do nothing with an event."""


def compare(job: Job, undisturbed: Job) -> list[str]:
    """Return what differs of a job's files, and of anything that any of its attempts reported."""
    expected, actual = Bench.files(undisturbed.output), Bench.files(job.output)
    faults = [f"{n} differs" for n in expected | actual if expected.get(n) != actual.get(n)]
    first, found = values_in(undisturbed.events), values_in(job.events)
    for (kind, step), values in found.items():
        for value in values:
            if value != first[kind, step][0]:
                faults.append(f"{kind} {step} was {first[kind, step][0]}, is {value}")
    return faults + [f"{kind} {step} is missing" for kind, step in first.keys() - found.keys()]


def kill_at_random(job: Job, ranks: int, moments: random.Random) -> bool:
    """Start the job, and kill its whole tree; False when it came to its end before.

    One of four is killed while it starts, the others somewhere in their training.
    """
    size = job.events.stat().st_size if job.events.exists() else 0
    launcher = "tests.support.reliability.launch_job"
    with (job.directory / "launcher.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", launcher, str(job.directory), str(ranks)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if moments.random() < 0.25:
        time.sleep(moments.uniform(0.1, 4.0))
    else:
        while process.poll() is None and not has_begun(job, size):
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 1.5))
    if process.poll() is not None:
        assert process.returncode == 0, (job.directory / "launcher.log").read_text()
        return False
    kill_tree(process)
    return True


def has_begun(job: Job, size: int) -> bool:
    """Return whether an attempt has reported a step, its events beginning after `size` bytes."""
    if not job.events.exists():
        return False
    with job.events.open("rb") as file:
        file.seek(size)
        return b'"kind": "step"' in file.read()
