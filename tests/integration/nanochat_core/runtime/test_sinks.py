"""wandb and trackio get what a job tells, and can do nothing to it."""

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from nanochat_core.job import Result
from nanochat_core.runtime import trackers
from nanochat_core.runtime.progress import Progress, read_events
from tests.support.small_job import one_thread, small_job

ROOT = Path(__file__).parents[4]


@pytest.fixture
def job(tmp_path):
    resources = one_thread(sinks=("wandb",))
    return small_job(tmp_path, fingerprint="ab" * 32, config={"seed": 3}, resources=resources)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(trackers, "_SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(trackers, "_SECONDS_TO_CATCH_UP", 120.0)


class Service:
    """Stands for the package: what is asked of it, and what it does instead."""

    def __init__(self, monkeypatch, fails_at="", slow=""):
        self.calls = []
        self._fails_at, self._slow = fails_at, slow
        module = types.ModuleType("wandb")
        module.init = lambda **settings: (self._do("init", settings), self)[1]
        monkeypatch.setitem(sys.modules, "wandb", module)

    def log(self, values, *, step):
        self._do("log", (step, values))

    def finish(self):
        self._do("finish", None)

    def _do(self, name, what):
        if name == self._fails_at:
            raise RuntimeError(f"no {name} today\nat all")
        if name == self._slow:
            time.sleep(60)
        self.calls.append((name, what))


def train(job, steps=3):
    """A job that tells of its steps."""
    progress = Progress(job.events)
    with trackers.following(job, active=True):
        progress.start(steps)
        for step in range(1, steps + 1):
            progress.step(step, loss=1.0 / step)
        progress.eval(steps, val_bpb=0.5)


def messages(job):
    return [e["text"] for e in read_events(job.events) if e["kind"] == "message"]


def test_a_sink_gets_every_step_and_evaluation(job, monkeypatch):
    Progress(job.events).step(9, loss=9.0)  # of an earlier execution, which sent it itself
    service = Service(monkeypatch)
    train(job)
    (_, settings), *logged, last = service.calls
    assert settings["name"] == "pretrain-abababababab"
    assert settings["config"]["seed"] == 3
    assert [what for _, what in logged] == [
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
        (3, {"loss": 1.0 / 3}),
        (3, {"val_bpb": 0.5}),
    ]
    assert last == ("finish", None)
    assert messages(job) == []


@pytest.mark.parametrize("fails_at", ["init", "log", "finish"])
def test_what_a_sink_raises_is_said_once(job, monkeypatch, fails_at):
    Service(monkeypatch, fails_at)
    train(job, steps=20)
    assert messages(job) == [f"wandb gets no more metrics: RuntimeError: no {fails_at} today"]


@pytest.mark.parametrize("slow", ["init", "log", "finish"])
def test_a_sink_that_hangs_is_left_behind(job, monkeypatch, slow):
    service = Service(monkeypatch, slow=slow)
    monkeypatch.setattr(trackers, "_SECONDS_TO_CATCH_UP", 0.3)
    train(job)
    assert slow not in [name for name, _ in service.calls]  # it still sleeps


def test_no_exit_hook_can_hold_the_worker(tmp_path):
    """As wandb's, which waits for its service when the interpreter ends."""
    job = small_job(tmp_path, fingerprint="ab" * 32, config={"seed": 3})
    toy = "import atexit, gc, time\n\natexit.register(time.sleep, 600)\n\ndef run(job):\n"
    (tmp_path / "toy.py").write_text(
        toy + "    print('said', end='')\n    return {'collects': gc.isenabled()}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "nanochat_core.worker", str(job.write())],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == b"said"
    result = Result.find(job.directory)
    assert result.status == "finished"
    assert result.metrics == {"collects": True}  # garbage, which is off while the stage is loaded


def test_a_sink_that_is_not_installed_is_said_and_nothing_else(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(job)
    assert messages(job) == ["wandb is not installed: metrics are in events.jsonl only"]


def test_only_the_first_rank_sends(job, monkeypatch):
    service = Service(monkeypatch)
    with trackers.following(job, active=False):
        Progress(job.events).step(1, loss=1.0)
    assert service.calls == []
