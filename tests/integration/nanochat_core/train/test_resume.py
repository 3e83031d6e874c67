"""A training job that is stopped and started again ends as if it had not been stopped."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from nanochat_core.data.row_files import Rows
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import load_model
from nanochat_core.runtime import interrupt
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.progress import Progress, last_by_step, read_events
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.loop import open_loop
from nanochat_core.train.loop.checkpoint import find_best, newest_step, write_best
from nanochat_core.train.loop.lineage import FILE
from nanochat_core.train.loop.metrics import TrainMetrics

pytestmark = pytest.mark.torch
RunStage: TypeAlias = Callable[[Job], dict[str, Any]]


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt.STOP, "requested", False)


def digest(directory: Path) -> dict[str, str]:
    """sha256 of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliver SIGTERM to this process once, right after `step` was reported."""
    report = Progress.step

    def step_then_stop(self: Progress, done: int, **values: float) -> None:
        report(self, done, **values)
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "step", step_then_stop)


@pytest.mark.parametrize(
    ("stage", "late"),
    [
        ("pretrain", False),
        ("midtrain", False),
        ("sft", False),
        ("rl", False),
        ("pretrain", True),
        ("sft", True),
    ],
)
def test_a_stopped_stage_resumes_to_the_same_bytes_and_scores(
    stage: str,
    late: bool,
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A model of this size answers nothing right: pay it for something it does half of the time.
    monkeypatch.setattr(rl, "are_correct", lambda _, graded: [len(a) % 2 == 0 for _, a in graded])
    if late:  # losses are read one step later, as on a GPU
        monkeypatch.setattr(open_loop, "TrainMetrics", partial(read_late, TrainMetrics))
    saved = 3 if late else 2  # the step after which it is stopped, and evaluates
    resources = {"eval_every_steps": saved}
    whole = make_job(stage, tmp_path / "whole", models, resources=resources)
    run_stage(whole)
    inputs = {name: shutil.copytree(path, tmp_path / name) for name, path in models.items()}
    parts = make_job(stage, tmp_path / "parts", inputs, resources=resources)
    with monkeypatch.context() as patch:
        old = signal.getsignal(signal.SIGTERM)
        interrupt.install()
        stop_after(2, patch)
        with pytest.raises(interrupt.Interrupted):
            run_stage(parts)
        signal.alarm(0)
        signal.signal(signal.SIGTERM, old)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt.STOP.requested = False
    assert newest_step(parts.checkpoints) == saved
    assert saved not in last_by_step(read_events(parts.events), "eval")
    if stage != "pretrain":  # the weights of a checkpoint are not those that have the record
        record = parts.model_input / FILE
        record.write_text(json.dumps({**json.loads(record.read_text()), "loss": 99.0}))
    run_stage(parts)
    assert digest(parts.output) == digest(whole.output)
    losses = [_values(job.events) for job in (whole, parts)]
    assert losses[0] == losses[1]
    scores = [last_by_step(read_events(job.events), "eval") for job in (whole, parts)]
    assert scores[0] == scores[1]
    assert list(scores[0])[:2] == [0, saved]
    assert find_best(parts.checkpoints) == find_best(whole.checkpoints) is not None
    assert stage != "rl" or all(values["useful_share"] > 0 for values in losses[0].values())
    assert any(e["kind"] == "start" and e["resumed"] for e in read_events(parts.events))


def read_late(made: type[TrainMetrics], *arguments: Any, late: bool) -> TrainMetrics:
    """Metrics that read a loss late, as on a GPU, whatever the device."""
    return made(*arguments, late=True)


def _values(events: Path) -> dict[int, dict[str, float]]:
    """What each step reported, times left out."""
    steps = last_by_step(read_events(events), "step")
    clocks = ("tokens_per_second", "seconds")
    return {s: {k: v for k, v in values.items() if k not in clocks} for s, values in steps.items()}


def test_a_damaged_newest_checkpoint_is_passed_over(
    models: dict[str, Path], make_job: Callable[..., Job], run_stage: RunStage, tmp_path: Path
) -> None:
    parts = make_job("pretrain", tmp_path / "parts", models, resources={"save_every_seconds": 0.0})
    run_stage(parts)
    newest = sorted(parts.checkpoints.glob("step-*"))[-1] / "tensors-00000.safetensors"
    flipped = bytearray(newest.read_bytes())
    flipped[-5] ^= 1
    newest.write_bytes(flipped)
    for path in sorted(parts.output.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    run_stage(parts)
    assert digest(parts.output) == digest(models["pretrain"])
    assert any("damaged" in e.get("text", "") for e in read_events(parts.events))


def test_the_best_state_is_taken_as_the_docs_say(
    data: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is judged as the state was."""
    job = make_job("pretrain", tmp_path / "job", data, resources={"eval_every_steps": 2})
    run_stage(job)
    said = last_by_step(read_events(job.events), "eval")
    write_best(job.checkpoints, 4, 0.0)  # of so short a run it is the last
    text = (Path(__file__).parents[4] / "docs/concepts/jobs.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/job.json", str(job.write())), {})
    model = load_model(tmp_path / "best", torch.device("cpu"))
    told = bits_per_byte(
        model,
        Rows.open(data["rows"], "val"),
        Tokenizer.load(tmp_path / "best" / "tokenizer").token_bytes(),
        num_tokens=job.config["pretrain"]["eval_tokens"],
        batch_size=4,
        world=ALONE,
    )
    assert told == said[4]["val_bpb"] != said[6]["val_bpb"]


def test_a_smaller_device_batch_changes_no_row_and_hardly_the_loss(
    models: dict[str, Path], make_job: Callable[..., Job], run_stage: RunStage, tmp_path: Path
) -> None:
    """Strict determinism besides, which computes the same on a CPU."""
    losses: list[list[float]] = []
    for size in (1, 4):
        resources = {"device_batch_size": size, "determinism": "strict"}
        job = make_job("pretrain", tmp_path / str(size), models, resources=resources)
        assert run_stage(job)["determinism"] == "strict"
        assert torch.are_deterministic_algorithms_enabled()
        steps = last_by_step(read_events(job.events), "step")
        losses.append([values["loss"] for values in steps.values()])
    torch.use_deterministic_algorithms(False)  # of this process, for other tests
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert digest(job.output) == digest(models["pretrain"])  # of size 4, by default determinism
