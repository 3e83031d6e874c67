"""A training job that is stopped and started again ends as if it had not been stopped."""

import dataclasses
import json
import re
import shutil
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from nanochat_core.data.row_files import Rows
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.model.checkpoint import load_config, load_model
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.loop import open_loop
from nanochat_core.train.loop.checkpoint import newest_step
from nanochat_core.train.loop.lineage import FILE
from nanochat_core.train.loop.metrics import TrainMetrics
from tests.support.nanochat_core.train.fixtures import are_even

pytestmark = pytest.mark.torch
DOCS = Path(__file__).parents[4] / "docs"
# RL with every option; of the other stages nothing is changed.
SECTIONS = {"pretrain": None, "midtrain": None, "sft": None}
SECTIONS["rl"] = {
    **{"num_steps": 4, "clip": 0.2, "updates_per_batch": 2, "kl_weight": 0.1},
    **{"baseline": "leave_one_out", "drop_equal_groups": True, "eval_samples": 2},
}


def read_late(made, *arguments, late):
    """Make metrics that read a loss late, as on a GPU, whatever the device."""
    return made(*arguments, late=True)


def reported(bench, job):
    """What each step reported, without times."""
    clocks = ("tokens_per_second", "seconds")
    steps = bench.values(job)
    return {s: {k: v for k, v in values.items() if k not in clocks} for s, values in steps.items()}


@pytest.mark.parametrize(
    ("stage", "late"), [*((stage, False) for stage in SECTIONS), ("pretrain", True), ("sft", True)]
)
def test_a_stopped_stage_resumes_to_the_same_bytes_and_scores(
    bench, stage, late, tmp_path, monkeypatch
):
    monkeypatch.setattr(rl, "are_correct", are_even)
    if late:
        monkeypatch.setattr(open_loop, "TrainMetrics", partial(read_late, TrainMetrics))
    saved = 3 if late else 2  # the step after which it is stopped, and evaluates
    how = {"section": SECTIONS[stage], "eval_every_steps": saved}
    whole, _ = bench.done(stage, "whole", **how)
    inputs = {name: shutil.copytree(path, tmp_path / name) for name, path in bench.models.items()}
    parts = bench.job(stage, "parts", inputs=inputs, **how)
    bench.stop_after(2, parts)
    assert bench.messages(parts)[-1].startswith(f"stopped at step {saved}/")
    assert newest_step(parts.checkpoints) == saved
    assert saved not in bench.values(parts, "eval")
    if stage != "pretrain":  # the weights of a checkpoint are not those that have the record
        record = parts.model_input / FILE
        record.write_text(json.dumps({**json.loads(record.read_text()), "loss": 99.0}))
    bench.run(parts)
    assert bench.files(parts.output) == bench.files(whole.output)
    steps = reported(bench, parts)
    assert steps == reported(bench, whole)
    assert bench.values(parts, "eval") == bench.values(whole, "eval")
    assert list(bench.values(parts, "eval"))[:2] == [0, saved]
    assert stage != "rl" or all(values["useful_share"] > 0 for values in steps.values())
    assert bench.has_resumed(parts)
    if stage != "rl":  # without an evaluation on the way the same is learnt
        assert bench.files(whole.output) == bench.files(bench.models[stage])


def test_an_earlier_state_is_taken_as_the_docs_say(bench, tmp_path, monkeypatch):
    """The model has the score that the state had."""
    job, _ = bench.done("pretrain", eval_every_steps=2)
    text = (DOCS / "concepts/jobs.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(code.replace("path/to/job.json", str(job.write())), {})
    found = bits_per_byte(
        load_model(tmp_path / "earlier", torch.device("cpu")),
        Rows.open(bench.data["rows"], "val"),
        Tokenizer.load(tmp_path / "earlier" / "tokenizer").token_bytes(),
        num_tokens=job.config["pretrain"]["eval_tokens"],
        batch_size=4,
        world=ALONE,
    )
    scores = bench.values(job, "eval")
    assert found == scores[4]["val_bpb"] != scores[6]["val_bpb"]


def test_a_smaller_device_batch_changes_no_row_and_hardly_the_loss(bench):
    """Nor does strict determinism, which computes the same on a CPU."""
    losses = []
    for size in (1, 4):
        job, metrics = bench.done(
            "pretrain", str(size), device_batch_size=size, determinism="strict"
        )
        assert metrics["determinism"] == "strict"
        assert torch.are_deterministic_algorithms_enabled()
        losses.append(bench.losses(job))
    torch.use_deterministic_algorithms(False)  # of this process, for other tests
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    # Of size 4, by default determinism.
    assert bench.files(job.output) == bench.files(bench.models["pretrain"])


# The stage that docs/contributing/stage.md shows runs, and resumes as it says.


@pytest.fixture
def stage():
    guide = (DOCS / "contributing/stage.md").read_text("utf-8")
    (text,) = re.findall(r"```python\n(\"\"\"Stage .*?)```", guide, re.DOTALL)
    module = types.ModuleType("longer")
    exec(compile(text, "stage.md", "exec"), module.__dict__)
    return module


def test_the_stage_of_the_guide_trains_on_and_resumes(bench, stage):
    base, _ = bench.done("pretrain", "base")

    def job_of(name):
        inputs = {"pretrain": base.output, "rows": bench.data["rows"]}
        return dataclasses.replace(bench.job("pretrain", name), stage="longer", inputs=inputs)

    whole, parts = job_of("whole"), job_of("parts")
    assert stage.run(whole) == {"steps": 6}
    bench.stop_after(3, parts, run=stage.run)
    assert not any(parts.output.iterdir())
    stage.run(parts)
    assert len(bench.losses(whole)) == 6
    assert bench.losses(parts) == bench.losses(whole)
    trained = bench.files(whole.output)
    assert bench.files(parts.output) == trained
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (base.output / name).read_bytes() != trained[name]
    assert load_config(whole.output) == load_config(base.output)
