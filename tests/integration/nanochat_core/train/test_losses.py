"""When a loss ends a run, and what a loop tells of its steps."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.runtime.hardware.gpu_specs import peak_flops
from nanochat_core.runtime.progress import Progress, last_by_step, read_events
from nanochat_core.train.loop import metrics as losses_module
from nanochat_core.train.loop.checkpoint import find_checkpoint, newest_step
from nanochat_core.train.loop.metrics import Throughput, TrainMetrics, is_exploding

pytestmark = pytest.mark.torch
PACE = Throughput(
    tokens_per_step=100, flops_per_token=10.0, peak_flops=4000.0, dollars_per_hour=3600.0
)
CALM = [3.0] * 50
MakeJob: TypeAlias = Callable[..., Job]


@pytest.mark.parametrize(
    ("losses", "step", "exploding"),
    [
        ([*CALM, *[10.1] * 10], 200, True),  # above 3 x 3 + 1
        ([*CALM, *[10.0] * 10], 200, False),
        ([*CALM, *[10.1] * 10], 99, False),  # the learning rate still warms up
        ([*CALM, *[10.1] * 9], 200, False),
        ([*CALM, *[10.1] * 9, 9.9], 200, False),  # it comes back by itself
        ([*CALM[:49], *[10.1] * 10], 200, False),  # too little to compare with
        ([*[90.0] * 24, *[3.0] * 26, *[10.1] * 10], 200, True),  # the median, not the mean
        ([*[0.001] * 50, *[0.9] * 10], 200, False),  # what is learnt by heart may be forgotten
        ([], 200, False),
    ],
)
def test_only_a_loss_that_stays_far_above_its_level_explodes(
    losses: list[float], step: int, exploding: bool
) -> None:
    assert is_exploding(losses, step) is exploding


def test_an_exploding_loss_stops_the_loop_at_the_tenth_step(tmp_path: Path) -> None:
    metrics = TrainMetrics(Progress(tmp_path / "events.jsonl"), PACE, late=False)
    losses = itertools.chain([3.0] * 150, itertools.repeat(40.0))
    seen: list[int] = []

    def loop() -> None:
        for done, loss in enumerate(losses, 1):
            metrics.record(done, torch.tensor(loss))
            metrics.flush()
            seen.append(done)

    with pytest.raises(StageError, match=r"explodes: 40 at step 159, .* level of 3, and no"):
        loop()
    assert seen[-1] == 159


def test_a_step_is_reported_with_its_speed_use_and_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 12.0, 12.0, 99.0, 103.0, 103.0])
    monkeypatch.setattr(losses_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = TrainMetrics(Progress(tmp_path / "events.jsonl"), PACE, late=False)
    metrics.resume({"losses": [3.0]}, 50.0)
    metrics.start_timer()
    for done in (8, 9):
        metrics.record(done, torch.tensor(2.5))
        metrics.flush()
        if done == 8:
            metrics.start_timer()  # after an evaluation, whose time is no step's
    told = last_by_step(read_events(tmp_path / "events.jsonl"), "step")
    assert told[8] == {"loss": 2.5, "tokens_per_second": 50.0, "mfu": 0.125, "dollars": 62.0}
    assert told[9] == {"loss": 2.5, "tokens_per_second": 25.0, "mfu": 0.0625, "dollars": 153.0}
    assert metrics.state() == {"losses": [3.0, 2.5, 2.5]}


def test_what_is_not_known_is_not_reported(tmp_path: Path) -> None:
    pace = Throughput(
        tokens_per_step=100, flops_per_token=10.0, peak_flops=None, dollars_per_hour=0.0
    )
    metrics = TrainMetrics(Progress(tmp_path / "events.jsonl"), pace, late=False)
    metrics.record(1, torch.tensor(2.5))
    metrics.flush()
    (values,) = last_by_step(read_events(tmp_path / "events.jsonl"), "step").values()
    assert sorted(values) == ["loss", "tokens_per_second"]


def test_read_late_every_step_is_reported_once_and_in_order(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "events.jsonl")
    progress.start(4)
    metrics = TrainMetrics(progress, PACE, late=True)
    told: list[list[int]] = []
    for done in range(1, 5):
        metrics.record(done, torch.tensor(float(done)))
        metrics.flush()
        if done == 3:
            metrics.sync()  # to save
        told.append(list(last_by_step(read_events(tmp_path / "events.jsonl"), "step")))
    metrics.sync()
    steps = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "step"]
    assert told == [[], [1], [1, 2, 3], [1, 2, 3]]
    assert [(e["step"], e["values"]["loss"]) for e in steps] == [(i, float(i)) for i in range(1, 5)]


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)


# In a stage.


@pytest.mark.parametrize("late", [False, True])
def test_pretraining_stops_at_a_broken_loss_and_keeps_the_state_before(
    late: bool,
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step 3 gives a loss that is no number, and gradients likewise, as a broken GPU would."""
    from nanochat_core.model.gpt import GPT
    from nanochat_core.train.loop import open_loop

    monkeypatch.setattr(
        open_loop,
        "TrainMetrics",
        lambda progress, pace, late: TrainMetrics(progress, pace, late=is_late),
    )
    is_late = late
    job = make_job(
        "pretrain", tmp_path / "job", data, resources={"save_every_steps": 1, "keep_checkpoints": 9}
    )
    real = GPT.summed_loss
    passes = itertools.count()

    def broken(self: GPT, *arguments: torch.Tensor) -> torch.Tensor:
        is_broken = torch.is_grad_enabled() and next(passes) >= 3
        return real(self, *arguments) * (math.nan if is_broken else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "summed_loss", broken)
        message = r"the loss is nan at step 3; the last good checkpoint is that of step 3$"
        with pytest.raises(StageError, match=message):
            run_stage(job)
    assert newest_step(job.checkpoints) == 3
    found = find_checkpoint(job.checkpoints, warn=pytest.fail)
    assert found is not None
    for key in found.pieces:
        assert torch.isfinite(found.read(key).float()).all()
    metrics = run_stage(job)  # the same command resumes
    assert math.isfinite(metrics["val_bpb"])
    assert list(last_by_step(read_events(job.events), "step")) == [1, 2, 3, 4, 5, 6]
