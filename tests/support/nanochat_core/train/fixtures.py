"""A pipeline small enough for tests: real stages on Python's own help topics, a depth-2 model.

Its artifacts are made once a run and read by all of pytest's workers: no test may write to them.
"""

import contextlib
import fcntl
import importlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from flows.profiles import open_profile
from flows.stages import STAGES, stage_named
from nanochat_core.config import RunConfig
from nanochat_core.job import Job
from nanochat_core.runtime import interrupt
from nanochat_core.runtime.progress import Progress, last_by_step, read_events
from tests.support.small_job import one_thread, small_job

BEFORE_TRAINING = ("shards", "task_data", "tokenizer", "tokens", "rows")
MODELS = ("pretrain", "midtrain", "sft")
OVERRIDES = (
    *("shards.source=local", "shards.num_shards=2", "shards.snapshot=[]"),
    *("tokenizer.vocab_size=512", "model.vocab_size=512", "model.width=64"),
    *("model.sequence_len=128", "rows.sequence_len=128", "model.windows=[64, 128]"),
    *("pretrain.num_steps=6", "pretrain.total_batch_size=512", "pretrain.eval_tokens=1024"),
    *("base_eval.eval_tokens=1024", "base_eval.max_new_tokens=8"),
    'task_data.datasets=[{"name": "identity", "grade": 1, "num_train": 20, "num_test": 4},'
    ' {"name": "spelling", "grade": 1, "num_train": 40, "num_test": 8},'
    ' {"name": "arithmetic", "grade": 1, "num_train": 40, "num_test": 8}]',
    'midtrain.mixture=[{"task": "spelling", "num_examples": 40, "epochs": 1},'
    ' {"task": "arithmetic", "num_examples": 40, "epochs": 1}]',
    *("midtrain.total_batch_size=1024", "midtrain.eval_examples=8"),
    'sft.mixture=[{"task": "arithmetic", "num_examples": 40, "epochs": 2}]',
    *("sft.total_batch_size=1024", "sft.eval_examples=8"),
    'chat_eval.tasks=[{"name": "spelling", "max_examples": 200, "max_new_tokens": 64},'
    ' {"name": "arithmetic", "max_examples": 200, "max_new_tokens": 48}]',
    *("rl.num_steps=3", "rl.examples_per_step=2", "rl.samples_per_example=4"),
    *("rl.max_new_tokens=8", "rl.eval_examples=4"),
)


class Bench:
    """Runs stages of the small pipeline in folders below `directory`.

    The pipeline's own artifacts are made when a test first asks for them.
    """

    def __init__(self, factory: pytest.TempPathFactory, directory: Path) -> None:
        self.factory, self.directory = factory, directory

    @cached_property
    def config(self) -> RunConfig:
        """The tiny profile, cut down further, reading a folder of text."""
        lines = [json.dumps({"text": text}) for text in topics.values()]

        def write(folder: Path) -> None:
            folder.mkdir()
            (folder / "topics.jsonl").write_text("\n".join(lines), encoding="utf-8")

        folder = made_once("text", self.factory, write)
        return open_profile("tiny", depth=2, overrides=[*OVERRIDES, f"shards.path={folder}"]).run

    @cached_property
    def data(self) -> dict[str, Path]:
        """Outputs of every stage before training, by name."""
        return self._outputs("data", BEFORE_TRAINING, {})

    @cached_property
    def models(self) -> dict[str, Path]:
        """`data`, and the outputs of pretrain, midtrain and sft."""
        return self._outputs("models", MODELS, self.data)

    def _outputs(
        self, folder: str, names: tuple[str, ...], inputs: dict[str, Path]
    ) -> dict[str, Path]:
        def make(root: Path) -> None:
            outputs, bench = dict(inputs), Bench(self.factory, root)
            for stage in (stage for stage in STAGES if stage.name in names):
                job = bench.job(stage.name, stage.name, inputs=outputs)
                bench.run(job)
                outputs[stage.name] = job.output

        root = made_once(folder, self.factory, make)
        return inputs | {name: root / name / "output" for name in names}

    def job(
        self,
        name: str,
        folder: str = "job",
        *,
        inputs: dict[str, Path] | None = None,
        section: dict[str, Any] | None = None,
        **resources: Any,
    ) -> Job:
        """Return a job of a stage with changes to its settings and resources. Inputs that are not
        given are the pipeline's."""
        stage, given = stage_named(name), inputs or {}
        lacking = {i.name for i in stage.inputs} - given.keys()
        if lacking:
            given = (self.data if lacking <= {*BEFORE_TRAINING} else self.models) | given
        tree = self.config.tree()
        sections = {key: tree[key] for key in stage.config}
        if section:
            sections[name] = {**sections[name], **section}
        directory = self.directory / folder
        directory.mkdir(parents=True, exist_ok=True)
        job = small_job(
            directory,
            stage=name,
            entry=stage.entry,
            config=sections,
            inputs={i.name: given[i.name] for i in stage.inputs},
            resources=one_thread(**{"device_batch_size": 4, **resources}),
        )
        job.output.mkdir(exist_ok=True)
        job.checkpoints.mkdir(exist_ok=True)
        return job

    @staticmethod
    def run(job: Job) -> dict[str, Any]:
        """Run a job in this process and return its metrics."""
        return importlib.import_module(job.entry).run(job)

    def done(self, *given: Any, **named: Any) -> tuple[Job, dict[str, Any]]:
        """Make a job as `job` does and run it: the job and its metrics."""
        job = self.job(*given, **named)
        return job, self.run(job)

    def stop_after(self, step: int, job: Job, run: Callable[[Job], Any] | None = None) -> None:
        """Run a job to which SIGTERM comes right after it reported a step."""
        report = Progress.step

        def report_and_stop(progress: Progress, done: int, **values: Any) -> None:
            report(progress, done, **values)
            if done == step:
                signal.raise_signal(signal.SIGTERM)

        with pytest.MonkeyPatch.context() as patch, worker_signals():
            patch.setattr(Progress, "step", report_and_stop)
            with pytest.raises(interrupt.Interrupted):
                (run or self.run)(job)

    @staticmethod
    def values(job: Job, kind: str = "step") -> dict[int, dict[str, float]]:
        """Return what a job last reported of each step, or of each `eval`."""
        return last_by_step(read_events(job.events), kind)

    @staticmethod
    def losses(job: Job) -> list[float]:
        return [values["loss"] for values in Bench.values(job).values()]

    @staticmethod
    def messages(job: Job) -> list[str]:
        """Return the texts that a job logged."""
        return [e["text"] for e in read_events(job.events) if e["kind"] == "message"]

    @staticmethod
    def has_resumed(job: Job) -> bool:
        """Return whether one of the job's executions resumed from a checkpoint."""
        return any(e["kind"] == "start" and e["resumed"] for e in read_events(job.events))

    @staticmethod
    def files(directory: Path) -> dict[str, bytes]:
        """Return the contents of every file below a directory."""
        found = (path for path in directory.rglob("*") if path.is_file())
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


@contextlib.contextmanager
def worker_signals() -> Iterator[None]:
    """Handle signals as a worker does; afterwards no stop is requested."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    interrupt.STOP.requested = False
    interrupt.install()
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupt.STOP.requested = False


def are_even(task: str, graded: Sequence[tuple[Any, str]]) -> list[bool]:
    """Grade answers by their length. So small a model answers nothing right, and half of its
    answers are even."""
    return [len(answer) % 2 == 0 for _, answer in graded]


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Bench:
    return Bench(tmp_path_factory, tmp_path)


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
