"""kill -9 of a training job at any moment, fifty times: it resumes, and ends with the same bytes.

A job is started as the product does, and the whole tree, launcher, torchrun and ranks, is killed at
a random moment, again and again until it ends undisturbed; then another one, until enough kills
have landed. Every loss that any attempt reported, the final weights and the final optimizer state
must be those of an undisturbed job; after each kill every committed checkpoint must be whole.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills. Of
this `make test` has nanochat_core/train/test_resume.py, which stops every stage and compares the
bytes, and bench/test_gpu.py, whose training is killed by SIGKILL and resumes.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.job import Job
from tests.support.campaigns import Campaign
from tests.support.flows.waiting import wait_until
from tests.support.reliability.kills import kill_tree, processes_of
from tests.support.reliability.small_training import (
    digests,
    find_torn,
    make_inputs,
    make_job,
    reported,
)

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.torch


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_kills_change_nothing(tmp_path: Path, ranks: int, campaign: Campaign) -> None:
    kills = campaign.trials(8)
    make = partial(make_job, inputs=make_inputs(tmp_path / "inputs"), num_steps=250)
    in_a_row, faults = land_kills(make, tmp_path, kills=kills, ranks=ranks, seed=campaign.seed)
    campaign.found(f"{kills} kills, {in_a_row} of them in a row")
    assert faults == []


def test_a_resumed_job_without_its_optimizer_state_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The campaign's control: the comparison finds the difference."""
    from nanochat_core.optim.sharded import Optimizer
    from nanochat_core.train import pretrain

    inputs = make_inputs(tmp_path / "inputs")
    whole = make_job(tmp_path / "whole", inputs, num_steps=12)
    pretrain.run(whole)
    parts = make_job(tmp_path / "parts", inputs, num_steps=12)
    with pytest.raises(StageInterrupted):
        run_job(parts, processes=1, on_event=ignore, steps=6)
    load = Optimizer.load

    def load_weights(self: Optimizer, read: Callable[[str], Any]) -> None:
        kept = ("weight/", "step")
        load(self, lambda key: read(key) if key.startswith(kept) else 0 * read(key))

    monkeypatch.setattr(Optimizer, "load", load_weights)
    pretrain.run(parts)
    faults = compare(parts, whole)
    assert any("model.safetensors" in fault for fault in faults)
    assert any(fault.startswith("step 8 ") for fault in faults)
    assert not any(fault.startswith("step 6 ") for fault in faults)


def land_kills(
    make: Callable[[Path], Job], directory: Path, *, kills: int, ranks: int, seed: int
) -> tuple[int, list[str]]:
    """Land so many kills on jobs that `make` makes in a directory, always the same one.

    Return how many came before the job had made another step, and what must be empty: what is torn
    or another than in an undisturbed job.
    """
    moments, faults = random.Random(seed), list[str]()
    undisturbed = make(directory / "undisturbed")
    run_job(undisturbed, processes=ranks, on_event=ignore)
    landed = in_a_row = number = 0
    while landed < kills:
        number += 1
        job, place = make(directory / f"job-{number}"), 0
        while landed < kills and kill_at_random(job, ranks, moments):
            before = place  # the last step that an attempt finished
            place = max((step for kind, step in reported(job) if kind == "step"), default=0)
            landed += 1
            in_a_row += place == before
            faults += [f"{name} is torn" for name in find_torn(job)]
            wait_until(
                lambda job=job: not processes_of(job.directory), seconds=120.0, what="orphans"
            )
        run_job(job, processes=ranks, on_event=ignore)
        faults += compare(job, undisturbed)
    return in_a_row, faults


def ignore(event: dict[str, Any]) -> None:
    """Do nothing with an event."""


def compare(job: Job, undisturbed: Job) -> list[str]:
    """What differs of a job's files, and of anything that any of its attempts reported."""
    expected, actual = digests(undisturbed), digests(job)
    faults = [f"{n} differs" for n in expected | actual if expected.get(n) != actual.get(n)]
    first = reported(undisturbed)
    for (kind, step), values in reported(job).items():
        for value in values:
            if value != first[kind, step][0]:
                faults.append(f"{kind} {step} was {first[kind, step][0]}, is {value}")
    faults += [f"{kind} {step} is missing" for kind, step in first.keys() - reported(job).keys()]
    return faults


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
