"""When a loss ends a run, and what a loop reports of its steps."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nanochat_core.errors import StageError
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.progress import Progress, last_by_step, read_events
from nanochat_core.train.loop import metrics as losses_module
from nanochat_core.train.loop import open_loop
from nanochat_core.train.loop.checkpoint import find_checkpoint, newest_step
from nanochat_core.train.loop.metrics import Throughput, TrainMetrics, is_exploding
from tests.integration.nanochat_core.train.test_resume import read_late

pytestmark = pytest.mark.torch
PACE = Throughput(
    tokens_per_step=100, flops_per_token=10.0, peak_flops=4000.0, dollars_per_hour=3600.0
)
UNKNOWN = Throughput(
    tokens_per_step=100, flops_per_token=10.0, peak_flops=None, dollars_per_hour=0.0
)
CALM = [3.0] * 50


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
def test_only_a_loss_that_stays_far_above_its_level_explodes(losses, step, exploding):
    assert is_exploding(losses, step) is exploding


@pytest.fixture
def loop(tmp_path):
    """loop(pace): metrics, and what they have reported of each step so far."""

    def make(pace=PACE, *, late=False):
        progress = Progress(tmp_path / "events.jsonl")
        progress.start(4)
        metrics = TrainMetrics(progress, pace, late=late)
        return metrics, lambda: last_by_step(read_events(tmp_path / "events.jsonl"), "step")

    return make


def take(metrics, done, loss):
    metrics.record(done, torch.tensor(loss))
    metrics.flush()


def test_a_step_is_reported_with_its_speed_use_and_cost(loop, monkeypatch):
    clock = iter([0.0, 10.0, 12.0, 12.0, 99.0, 103.0, 103.0])
    monkeypatch.setattr(losses_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics, steps = loop()
    metrics.resume({"losses": [3.0]}, 50.0)
    metrics.start_timer()
    take(metrics, 8, 2.5)
    metrics.start_timer()  # after an evaluation, whose time is no step's
    take(metrics, 9, 2.5)
    assert steps() == {
        8: {"loss": 2.5, "tokens_per_second": 50.0, "mfu": 0.125, "dollars": 62.0},
        9: {"loss": 2.5, "tokens_per_second": 25.0, "mfu": 0.0625, "dollars": 153.0},
    }
    assert metrics.state() == {"losses": [3.0, 2.5, 2.5]}


def test_what_is_not_known_is_not_reported(loop):
    metrics, steps = loop(UNKNOWN)
    take(metrics, 1, 2.5)
    assert sorted(steps()[1]) == ["loss", "tokens_per_second"]


def test_read_late_every_step_is_reported_once_and_in_order(loop, tmp_path):
    metrics, steps = loop(late=True)
    seen = []
    for done in range(1, 5):
        take(metrics, done, float(done))
        if done == 3:
            metrics.sync()  # to save
        seen.append(list(steps()))
    metrics.sync()
    events = [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "step"]
    assert seen == [[], [1], [1, 2, 3], [1, 2, 3]]
    assert [(e["step"], e["values"]["loss"]) for e in events] == [(i, i) for i in range(1, 5)]


def test_pretraining_stops_at_a_broken_loss_and_keeps_the_state_before(bench, monkeypatch):
    """Step 3 gives a loss that is no number, and gradients likewise, as a broken GPU would. The
    loss is read late, as on a GPU."""
    monkeypatch.setattr(open_loop, "TrainMetrics", partial(read_late, TrainMetrics))
    job = bench.job("pretrain", save_every_steps=1, keep_checkpoints=9)
    real, passes = GPT.summed_loss, itertools.count()

    def broken(self, *arguments):
        is_broken = torch.is_grad_enabled() and next(passes) >= 3
        return real(self, *arguments) * (math.nan if is_broken else 1.0)

    message = r"the loss is nan at step 3; the last good checkpoint is that of step 3$"
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "summed_loss", broken)
        with pytest.raises(StageError, match=message):
            bench.run(job)
    assert newest_step(job.checkpoints) == 3
    found = find_checkpoint(job.checkpoints, warn=pytest.fail)
    assert all(torch.isfinite(found.read(key).float()).all() for key in found.pieces)
    assert math.isfinite(bench.run(job)["val_bpb"])  # the same command resumes
    assert list(bench.values(job)) == [1, 2, 3, 4, 5, 6]
