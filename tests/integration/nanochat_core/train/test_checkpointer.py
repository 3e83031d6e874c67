"""Saving while the loop continues: what is stored, what is never saved, and when a loop waits."""

import json
import math
import threading
import time
from dataclasses import replace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from nanochat_core.errors import StageError
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime import interrupt
from nanochat_core.runtime.hardware.distributed import ALONE, World
from nanochat_core.runtime.progress import Progress, read_events
from nanochat_core.train.loop import checkpointer as checkpointer_module
from nanochat_core.train.loop.checkpointer import Checkpointer
from nanochat_core.train.loop.metrics import Throughput, TrainMetrics

pytestmark = pytest.mark.torch
PACE = Throughput(tokens_per_step=1, flops_per_token=1.0, peak_flops=None, dollars_per_hour=0.0)


class Owner:
    """What a checkpointer needs of an optimizer: some state."""

    def __init__(self, value=1.0):
        self.weight = torch.full((4, 3), value)

    def pieces(self):
        """The state itself, as an optimizer gives it."""
        return {"weight/x": self.weight, "step": torch.tensor(3)}

    def load(self, read):
        self.weight.copy_(read("weight/x"))


@pytest.fixture(autouse=True)
def _no_stop(monkeypatch):
    monkeypatch.setattr(interrupt.STOP, "requested", False)


@pytest.fixture
def job(bench):
    return bench.job("shards", inputs={})


def make_checkpointer(job, owner, *, late=False, pace=None, world=ALONE, num_steps=9):
    progress = Progress(job.events)
    metrics = TrainMetrics(progress, pace, late=late)
    checkpointer = Checkpointer(job, cast(Optimizer, owner), world, progress, metrics)
    checkpointer.num_steps = num_steps
    return checkpointer, metrics


def save_if_due(checkpointer, done, state=None):
    """Do what a loop does after a step."""
    if checkpointer.is_due(done):
        checkpointer.save(done, state or {})


def steps_in(job):
    return sorted(int(p.parent.name[5:]) for p in job.checkpoints.glob("step-*/COMMIT.json"))


def with_resources(job, **resources):
    return replace(job, resources=replace(job.resources, **resources))


# The checkpointer.


def test_a_copy_is_saved_and_not_what_the_next_step_makes_of_it(job, monkeypatch):
    go = threading.Event()
    write = checkpointer_module.write_pieces
    monkeypatch.setattr(checkpointer_module, "write_pieces", lambda *a: (go.wait(120), write(*a)))
    owner = Owner(1.0)
    checkpointer, _ = make_checkpointer(job, owner)
    save_if_due(checkpointer, 1, {"first": 2.5})  # the first is always saved
    owner.weight.fill_(7.0)  # the next step, while the disk is slow
    assert steps_in(job) == []
    go.set()
    checkpointer.close()
    saved = load_file(job.checkpoints / "step-0000001" / "tensors-00000.safetensors")
    assert torch.equal(saved["weight/x"], torch.ones(4, 3))
    other = Owner(0.0)
    again, metrics = make_checkpointer(job, other)
    step, state = again.resume(9)
    assert (step, state["first"]) == (1, 2.5)
    assert torch.equal(other.weight, torch.ones(4, 3))
    assert (
        metrics.seconds
        >= json.loads((job.checkpoints / "step-0000001" / "COMMIT.json").read_text())["seconds"]
    )


def test_two_saves_are_never_written_at_once_and_the_loop_waits(job, monkeypatch):
    job = with_resources(job, save_every_steps=1)
    going = []
    most = []
    write = checkpointer_module.write_pieces

    def slowly(*arguments):
        going.append(1)
        most.append(len(going))
        time.sleep(0.1)
        write(*arguments)
        going.pop()

    monkeypatch.setattr(checkpointer_module, "write_pieces", slowly)
    checkpointer, _ = make_checkpointer(job, Owner())
    began = time.monotonic()
    for done in range(1, 5):
        save_if_due(checkpointer, done)
    assert time.monotonic() - began > 0.29
    checkpointer.close()
    assert max(most) == 1
    assert steps_in(job) == [3, 4]


class TwoNodes(World):
    """Rank 0 of two; no collective reaches the other."""

    def any_of(self, *flags):
        return list(flags)

    def barrier(self):
        return


def test_a_stop_gives_up_a_save_that_waits_for_another_nodes_file(job, monkeypatch):
    write = checkpointer_module.write_pieces

    def write_both(directory, rank, tensors):
        if directory.name.endswith("2"):  # of step 1 the other node's file does not come
            write(directory, 1, {})
        write(directory, rank, tensors)

    monkeypatch.setattr(checkpointer_module, "write_pieces", write_both)
    world = TwoNodes(rank=0, local_rank=0, size=2)
    checkpointer, _ = make_checkpointer(job, Owner(), world=world)
    save_if_due(checkpointer, 1)
    monkeypatch.setattr(interrupt.STOP, "requested", True)
    with pytest.raises(interrupt.Interrupted):
        save_if_due(checkpointer, 2)
    assert steps_in(job) == [2]


@pytest.mark.parametrize(
    ("resources", "kept"),
    [
        ({}, [1, 9]),  # the first of an execution, and the last
        ({"save_every_steps": 4}, [1, 4, 8, 9]),
        ({"save_every_seconds": 0.0}, list(range(1, 10))),
    ],
)
def test_the_cadence_is_by_time_and_by_steps(job, resources, kept):
    job = with_resources(job, keep_checkpoints=100, **resources)
    checkpointer, _ = make_checkpointer(job, Owner())
    for done in range(1, 10):
        save_if_due(checkpointer, done)
    checkpointer.close()
    assert steps_in(job) == kept


def test_a_loop_that_evaluates_has_saved_before(job):
    """The ends of a loop are evaluated without being asked for."""
    checkpointer, _ = make_checkpointer(with_resources(job, eval_every_steps=3), Owner())
    assert not checkpointer.is_to_validate(0)
    for done in range(1, 10):
        assert checkpointer.is_to_validate(done) == (done in (3, 6))
        assert checkpointer.is_due(done) == (done in (1, 3, 6, 9))
        save_if_due(checkpointer, done)
    checkpointer.close()
    assert steps_in(job) == [6, 9]


def test_a_full_disk_ends_the_loop_and_leaves_the_checkpoint_before(job, monkeypatch):
    checkpointer, _ = make_checkpointer(with_resources(job, save_every_steps=3), Owner())
    save_if_due(checkpointer, 1)

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    checkpointer.close()
    monkeypatch.setattr(checkpointer_module, "write_pieces", refuse)
    save_if_due(checkpointer, 3)

    def loop():
        for done in range(4, 12_000):  # two minutes
            time.sleep(0.01)
            save_if_due(checkpointer, done)

    with pytest.raises(OSError, match="No space left"):
        loop()
    assert steps_in(job) == [1]


def test_a_sum_that_overflows_is_no_number_that_is_not_finite(job):
    owner = Owner(3e38)
    checkpointer, _ = make_checkpointer(job, owner)
    save_if_due(checkpointer, 1)
    checkpointer.close()
    assert steps_in(job) == [1]


# What is never saved.


def read_steps(metrics, checkpointer, losses, *, start=0):
    for done, loss in enumerate(losses[start:], start + 1):
        metrics.record(done, torch.tensor(loss))
        yield done  # the optimizer's step
        metrics.flush()
        save_if_due(checkpointer, done)


def test_a_loss_that_is_broken_before_any_save_has_no_state_to_resume_from(job):
    checkpointer, metrics = make_checkpointer(job, Owner(), late=True)
    applied = []
    with pytest.raises(StageError, match="no checkpoint was saved before"):
        applied.extend(read_steps(metrics, checkpointer, [math.nan, 1.0, 1.0]))
    assert applied == [1]


@pytest.mark.parametrize("late", [False, True])
def test_the_state_after_a_broken_step_is_never_saved(job, late):
    job = with_resources(job, keep_checkpoints=100, save_every_steps=1)
    checkpointer, metrics = make_checkpointer(job, Owner(), late=late)
    applied = []
    with pytest.raises(StageError, match=r"the loss is nan at step 3; .*that of step 3$") as caught:
        applied.extend(read_steps(metrics, checkpointer, [2.0, 1.9, 1.8, math.nan, 1.7]))
    assert applied == ([1, 2, 3, 4] if late else [1, 2, 3])  # read at once it is not even applied
    assert steps_in(job) == [1, 2, 3]
    assert "resume from there" in str(caught.value.hint)
    reported = [e["step"] for e in read_events(job.events) if e["kind"] == "step"]
    assert reported == [1, 2, 3]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_while_losses_explode_nothing_is_saved_and_the_last_good_checkpoint_stays(job, late, keep):
    job = with_resources(job, keep_checkpoints=keep, save_every_steps=5)
    checkpointer, metrics = make_checkpointer(job, Owner(), late=late, pace=PACE)
    losses = [3.0] * 151 + [40.0] * 20
    with pytest.raises(StageError, match=r"explodes: 40 at step 160, .*that of step 150$"):
        list(read_steps(metrics, checkpointer, losses))
    assert steps_in(job) == [145, 150][-keep:]


@pytest.mark.parametrize("late", [False, True])
def test_what_a_stop_saved_among_exploding_losses_is_not_resumed_from(job, late, monkeypatch):
    job = with_resources(job, keep_checkpoints=1, save_every_steps=5)
    checkpointer, metrics = make_checkpointer(job, Owner(), late=late, pace=PACE)
    losses = [3.0] * 151 + [40.0] * 20

    def loop():
        for done in read_steps(metrics, checkpointer, losses):
            monkeypatch.setattr(interrupt.STOP, "requested", done == 155)

    with pytest.raises(interrupt.Interrupted):
        loop()
    assert steps_in(job) == [150, 155]
    monkeypatch.setattr(interrupt.STOP, "requested", False)
    again, metrics = make_checkpointer(job, Owner(), late=late, pace=PACE)
    assert again.resume(9)[0] == 155
    with pytest.raises(StageError, match=r"explodes: 40 at step 160, .*that of step 150$"):
        list(read_steps(metrics, again, losses, start=155))
    assert steps_in(job) == [150]
    last, _ = make_checkpointer(job, Owner())
    assert last.resume(9)[0] == 150


def test_losses_that_come_back_by_themselves_are_saved_again(job):
    job = with_resources(job, save_every_steps=5)
    checkpointer, metrics = make_checkpointer(job, Owner(), pace=PACE)
    list(read_steps(metrics, checkpointer, [3.0] * 151 + [40.0] * 5 + [3.0] * 9))
    checkpointer.close()
    assert steps_in(job) == [160, 165]


def test_a_state_with_a_number_that_is_not_finite_is_not_committed(job):
    owner = Owner()
    checkpointer, _ = make_checkpointer(with_resources(job, save_every_steps=1), owner)
    save_if_due(checkpointer, 1)
    checkpointer.close()
    owner.weight[2, 1] = math.nan  # though its own loss was fine
    save_if_due(checkpointer, 2)
    with pytest.raises(StageError, match=r"weight/x is not finite after step 2.*that of step 1"):
        checkpointer.close()
    assert steps_in(job) == [1]
