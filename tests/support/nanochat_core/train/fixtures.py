"""A pipeline small enough for tests: real stages on Python's own help topics, a depth-2 model.

Its artifacts are made once a run and read by all of pytest's workers: no test may write to them.
"""

import fcntl
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from flows.profiles import open_profile
from flows.stages import STAGES, stage_named
from nanochat_core.config import RunConfig
from nanochat_core.job import Job
from tests.support.small_job import one_thread, small_job

BEFORE_TRAINING = ("shards", "task_data", "tokenizer", "tokens", "rows")
OVERRIDES = (
    "shards.source=local",
    "shards.num_shards=2",
    "shards.snapshot=[]",
    "tokenizer.vocab_size=512",
    "model.vocab_size=512",
    "model.width=64",
    "model.sequence_len=128",
    "rows.sequence_len=128",
    "model.windows=[64, 128]",
    "pretrain.num_steps=6",
    "pretrain.total_batch_size=512",
    "pretrain.eval_tokens=1024",
    "base_eval.eval_tokens=1024",
    "base_eval.max_new_tokens=8",
    'task_data.datasets=[{"name": "identity", "grade": 1, "num_train": 20, "num_test": 4},'
    ' {"name": "spelling", "grade": 1, "num_train": 40, "num_test": 8},'
    ' {"name": "arithmetic", "grade": 1, "num_train": 40, "num_test": 8}]',
    'midtrain.mixture=[{"task": "spelling", "num_examples": 40, "epochs": 1},'
    ' {"task": "arithmetic", "num_examples": 40, "epochs": 1}]',
    "midtrain.total_batch_size=1024",
    "midtrain.eval_examples=8",
    'sft.mixture=[{"task": "arithmetic", "num_examples": 40, "epochs": 2}]',
    "sft.total_batch_size=1024",
    "sft.eval_examples=8",
    'chat_eval.tasks=[{"name": "spelling", "max_examples": 200, "max_new_tokens": 64},'
    ' {"name": "arithmetic", "max_examples": 200, "max_new_tokens": 48}]',
    "rl.num_steps=3",
    "rl.examples_per_step=2",
    "rl.samples_per_example=4",
    "rl.max_new_tokens=8",
    "rl.eval_examples=4",
)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The tiny profile, cut down further, reading a folder of text."""
    lines = [json.dumps({"text": text}) for text in topics.values()]

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "topics.jsonl").write_text("\n".join(lines), encoding="utf-8")

    folder = made_once("text", tmp_path_factory, write)
    return open_profile("tiny", depth=2, overrides=[*OVERRIDES, f"shards.path={folder}"]).run


@pytest.fixture(scope="session")
def make_job(config: RunConfig) -> Callable[..., Job]:
    """make_job(stage name, directory, inputs, section={...}, resources={...}) -> Job."""

    def make(
        name: str,
        directory: Path,
        inputs: dict[str, Path],
        *,
        section: dict[str, Any] | None = None,
        resources: dict[str, Any] | None = None,
    ) -> Job:
        stage = stage_named(name)
        tree = config.tree()
        sections = {key: tree[key] for key in stage.config}
        if section:
            sections[name] = {**sections[name], **section}
        directory.mkdir(parents=True, exist_ok=True)
        job = small_job(
            directory,
            stage=name,
            entry=stage.entry,
            config=sections,
            inputs={i.name: inputs[i.name] for i in stage.inputs},
            resources=one_thread(**{"device_batch_size": 4, **(resources or {})}),
        )
        job.output.mkdir(exist_ok=True)
        job.checkpoints.mkdir(exist_ok=True)
        return job

    return make


@pytest.fixture(scope="session")
def run_stage() -> Callable[[Job], dict[str, Any]]:
    """Runs a job in this process."""
    return _run_stage


def _run_stage(job: Job) -> dict[str, Any]:
    return importlib.import_module(job.entry).run(job)


@pytest.fixture(scope="session")
def data(make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Outputs of every stage before training, by name."""
    return _outputs("data", BEFORE_TRAINING, {}, make_job, tmp_path_factory)


@pytest.fixture(scope="session")
def models(
    data: dict[str, Path], make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """`data`, and the outputs of pretrain, midtrain and sft."""
    names = ("pretrain", "midtrain", "sft")
    return _outputs("models", names, data, make_job, tmp_path_factory)


def made_once(
    name: str, tmp_path_factory: pytest.TempPathFactory, make: Callable[[Path], None]
) -> Path:
    """Return a directory that the first of pytest's workers to ask has filled with `make`."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    directory, done = root / f"shared-{name}", root / f"shared-{name}.done"
    with (root / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(directory)
            done.touch()
    return directory


def _outputs(
    folder: str,
    names: tuple[str, ...],
    inputs: dict[str, Path],
    make_job: Callable[..., Job],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    def make(root: Path) -> None:
        outputs = dict(inputs)
        for stage in (stage for stage in STAGES if stage.name in names):
            job = make_job(stage.name, root / stage.name, outputs)
            _run_stage(job)
            outputs[stage.name] = job.output

    root = made_once(folder, tmp_path_factory, make)
    return inputs | {name: root / name / "output" for name in names}
