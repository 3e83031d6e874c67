import json
import shutil
import sys
from types import ModuleType

import pytest

from nanochat_core.data.conversations import task_data
from nanochat_core.runtime.interrupt import Interrupted
from nanochat_core.runtime.progress import last_by_step, read_events
from tasks.kinds.files import open_task
from tasks.kinds.sources import GeneratedTask, Grader
from tasks.names import TASKS
from tests.support.nanochat_core.data.fixtures import digests, refused
from tests.support.small_job import small_job

SMALL = (("identity", 1, 500, 5), ("spelling", 1, 60, 20), ("arithmetic", 1, 60, 20))


def make_job(directory, *, seed=42, datasets=SMALL):
    names = ("name", "grade", "num_train", "num_test")
    trees = [dict(zip(names, dataset, strict=True)) for dataset in datasets]
    job = small_job(
        directory,
        stage="task_data",
        entry="nanochat_core.data.conversations.task_data",
        config={"seed": seed, "task_data": {"datasets": trees}},
    )
    job.output.mkdir(parents=True, exist_ok=True)
    return job


def test_every_dataset_is_written_and_counted(tmp_path):
    job = make_job(tmp_path)
    metrics = task_data.run(job)
    described = json.loads((job.output / "task_data.json").read_text())
    assert described["format"] == task_data.FORMAT
    assert list(described["datasets"]) == ["identity", "spelling", "arithmetic"]
    counts = {"train": 60, "test": 20, "overlap": 0}
    assert described["datasets"]["spelling"] == {"kind": "generated", "grade": 1, **counts}
    assert described["core"] is None
    assert sorted(p.name for p in job.directory.iterdir()) == ["events.jsonl", "output"]
    for name, counts in described["datasets"].items():
        for split in ("train", "test"):
            assert len(open_task(name, job.output, split)) == counts[split]
            assert metrics[f"{name}_{split}"] == counts[split]
    assert 60 <= described["datasets"]["identity"]["train"] < 500
    sizes = [entry["train"] + entry["test"] for entry in described["datasets"].values()]
    steps = last_by_step(read_events(job.events), "step")
    assert steps == {n: {"examples": float(size)} for n, size in enumerate(sizes, start=1)}


def test_the_seed_decides_every_byte(tmp_path):
    jobs = [make_job(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2))]
    for job in jobs:
        task_data.run(job)
    first, again, other = (digests(job.output) for job in jobs)
    assert first == again
    assert first["spelling/train.jsonl"] != other["spelling/train.jsonl"]
    files = {f"{name}/{split}.jsonl" for name, *_ in SMALL for split in ("train", "test")}
    assert first.keys() == {"task_data.json"} | files


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (("gsm9k", 1, 1, 1), "there is no task 'gsm9k'"),
        (("spelling", 9, 1, 1), "spelling has no grade 9"),
        (("spelling", 1, None, 1), "spelling is synthetic: give num_train"),
    ],
)
def test_a_dataset_that_cannot_be_made_is_refused_and_leaves_nothing(tmp_path, dataset, message):
    refused(message, task_data.run, make_job(tmp_path, datasets=(dataset,)))


def ask(text):
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("gradable", [True, False])
def test_a_generated_prompt_in_both_splits_is_refused_where_it_would_be_graded(
    tmp_path, monkeypatch, gradable
):
    def generate(split, num_examples, *, grade, seed):
        first = {"train": 0, "test": 8}[split]
        yield from (ask(str(i)) for i in range(first, first + num_examples))

    grader = Grader(is_correct=lambda c, a: True, baseline=0.0) if gradable else None
    module = ModuleType("numbers_task")
    vars(module)["TASK"] = GeneratedTask(name="numbers", generate=generate, grader=grader)
    monkeypatch.setitem(sys.modules, "numbers_task", module)
    monkeypatch.setitem(TASKS, "numbers", "numbers_task:TASK")
    job = make_job(tmp_path, datasets=(("numbers", 1, 10, 5),))
    if gradable:
        refused(r"2 prompts of task 'numbers' are in both .*'user: 8'", task_data.run, job)
    else:
        assert task_data.run(job)["numbers_overlap"] == 2
    apart = make_job(tmp_path / "apart", datasets=(("numbers", 1, 8, 5),))
    assert "numbers_overlap" not in task_data.run(apart)


def test_a_killed_or_stopped_stage_does_what_is_not_done(tmp_path, monkeypatch):
    made = []
    original = task_data.write_dataset

    def write(dataset, *args, **kwargs):
        made.append(dataset.name)
        if made == ["identity", "spelling", "arithmetic"]:
            raise Interrupted("SIGTERM")
        return original(dataset, *args, **kwargs)

    monkeypatch.setattr(task_data, "write_dataset", write)
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        task_data.run(job)
    assert sorted(p.name for p in job.output.iterdir()) == ["identity", "spelling"]
    (job.output / "arithmetic").mkdir()  # as a kill leaves it
    (job.output / "arithmetic" / "train.jsonl").write_text('{"messages": [')
    metrics = task_data.run(job)
    assert made == ["identity", "spelling", "arithmetic", "arithmetic"]
    whole = make_job(tmp_path / "whole")
    assert task_data.run(whole) == metrics
    assert digests(job.output) == digests(whole.output)


def test_what_was_made_for_another_seed_or_number_is_made_again(tmp_path, monkeypatch):
    job = make_job(tmp_path)

    def keep(path, *, rmtree=shutil.rmtree, **options):
        """As if the stage were stopped before it tidies up."""
        if path.name != "scratch":
            rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", keep)
    task_data.run(job)
    before = digests(job.output)
    more = (*SMALL[:1], ("spelling", 1, 61, 20), *SMALL[2:])
    task_data.run(make_job(tmp_path, datasets=more))
    now = digests(job.output)
    assert now["spelling/train.jsonl"] != before["spelling/train.jsonl"]
    assert now["arithmetic/train.jsonl"] == before["arithmetic/train.jsonl"]
    task_data.run(make_job(tmp_path, seed=7, datasets=more))
    assert digests(job.output)["arithmetic/train.jsonl"] != now["arithmetic/train.jsonl"]
