"""When a loss or a lack of memory ends a run, and what a loop reports of its steps."""

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from nanochat_core.errors import OutOfMemory, StageError
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.oom import is_out_of_memory, oom_explained
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


# A lack of memory ends a training job with an error that says what may fit.

GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8796093022208 bytes. Error code 12 (Cannot allocate memory)"
)
OTHER = RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def fail(monkeypatch, owner, name, error):
    """Let what trains raise an error: of a model only where gradients are wanted."""
    real = getattr(owner, name)

    def failing(self, *given, **named):
        if owner is Optimizer or torch.is_grad_enabled():
            raise error
        return real(self, *given, **named)

    monkeypatch.setattr(owner, name, failing)


def test_torchs_own_words_are_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**43, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(GPU)
    assert not is_out_of_memory(OTHER)


@pytest.mark.parametrize(
    ("owner", "name", "size", "retry", "message", "hint"),
    [
        (GPT, "summed_loss", 4, True, "4 rows per device: CUDA out", "--device-batch-size 2"),
        (GPT, "summed_loss", 4, False, "4 rows per device: CUDA out", "--device-batch-size 2"),
        (GPT, "summed_loss", 1, True, "one row per device: CUDA out", "smaller --depth"),
        (Optimizer, "step", 4, True, "4 rows per device", "--device-batch-size 2"),
    ],
)
def test_the_error_says_what_fits(bench, owner, name, size, retry, message, hint, monkeypatch):
    job = bench.job("pretrain", device_batch_size=size, retry_smaller_batch=retry)
    fail(monkeypatch, owner, name, GPU)
    with pytest.raises(StageError, match=f"^out of memory with {message}") as caught:
        bench.run(job)
    assert type(caught.value) is (OutOfMemory if retry and size > 1 else StageError)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GPU, "out of memory with 4 rows per device: CUDA out"),
        (CPU, "the host is out of memory: .*DefaultCPUAllocator"),
    ],
)
def test_a_gpus_job_that_finds_no_memory_of_the_host_is_not_retried_with_fewer_rows(
    error, message, bench
):
    resources = replace(bench.job("pretrain").resources, device="cuda", retry_smaller_batch=True)
    with pytest.raises(StageError, match=f"^{message}") as caught, oom_explained(resources):
        raise error
    assert isinstance(caught.value, OutOfMemory) == (error is GPU)
