"""A loop shows signs of life however long its steps and its saves take."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from infra.launch.watchdog import Watchdog, heartbeats_of
from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.heartbeat import HEARTBEAT, HeartbeatWriter, read_heartbeats
from nanochat_core.train import rl
from nanochat_core.train.loop import checkpointer

pytestmark = pytest.mark.torch
MakeJob: TypeAlias = Callable[..., Job]
PASS = "pass"  # of the model, in a step's gradients


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the rank does: every beat, and every pass."""
    said: list[str] = []

    def beat(self: HeartbeatWriter, doing: str, *, steps: int = 0) -> None:
        said.append(doing)

    monkeypatch.setattr(HeartbeatWriter, "beat", beat)
    real = GPT.token_losses

    def token_losses(self: GPT, *arguments: Any) -> torch.Tensor:
        said.append(PASS)
        return real(self, *arguments)

    monkeypatch.setattr(GPT, "token_losses", token_losses)
    summed = GPT.summed_loss

    def summed_loss(self: GPT, *arguments: Any) -> torch.Tensor:
        said.append(PASS)
        return summed(self, *arguments)

    monkeypatch.setattr(GPT, "summed_loss", summed_loss)
    return said


@pytest.mark.parametrize("stage", ["pretrain", "sft", "rl"])
def test_every_pass_through_the_model_begins_with_a_sign_of_life(
    stage: str,
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that none is missed, however many of them make up a step."""
    monkeypatch.setattr(rl, "are_correct", lambda _, graded: [len(a) % 2 == 0 for _, a in graded])
    # An update against a reference and an older policy too: more passes than one kind.
    section = {"updates_per_batch": 2, "clip": 0.2, "kl_weight": 0.1} if stage == "rl" else None
    resources = {"device_batch_size": 1}
    job = make_job(stage, tmp_path / "job", models, section=section, resources=resources)
    run_stage(job)
    kinds = [list(group) for _, group in itertools.groupby(told, lambda said: said == PASS)]
    passes = [group for group in kinds if group[0] == PASS]
    assert len(passes) > 12
    assert {len(group) for group in passes} == {1}


@pytest.fixture
def heart(make_job: MakeJob, tmp_path: Path) -> Iterator[Job]:
    """A job of which the launcher expects a sign of life every half a second."""
    job = make_job("shards", tmp_path / "job", {}, resources={"hang_seconds": 0.5})
    HEARTBEAT.open(heartbeats_of(job), 0)
    HEARTBEAT.started()
    HEARTBEAT.beat("training", steps=1)
    yield job
    vars(HEARTBEAT).update(vars(HeartbeatWriter()))  # closed


def test_a_loop_that_waits_for_a_slow_disk_does_not_hang(heart: Job) -> None:
    [first] = read_heartbeats(heartbeats_of(heart))

    def write() -> None:
        beat = first.beat
        for _ in range(3):
            while (heartbeat := next(read_heartbeats(heartbeats_of(heart)))).beat == beat:
                time.sleep(0.01)
            beat = heartbeat.beat

    checkpointer._Writing(write).wait()


def test_a_disk_that_hangs_is_found_in_the_end(heart: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "_SECONDS_FOR_A_DISK", 0.1)

    def write() -> None:
        watch = Watchdog(heart)
        while watch.find() is None:
            time.sleep(0.1)

    checkpointer._Writing(write).wait()
