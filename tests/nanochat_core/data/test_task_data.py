import hashlib
import itertools
import json
import subprocess
import sys

import pytest

from nanochat_core.data import task_data
from nanochat_core.engine.calculator import calculate
from nanochat_core.errors import DataError
from nanochat_core.job import Job, Resources
from tasks.base import prompt_key, text_of
from tasks.files import open_task
from tasks.registry import is_correct, is_gradable

RESOURCES = Resources(
    device="cpu",
    threads=1,
    device_batch_size=1,
    save_every_seconds=1.0,
    eval_every_steps=0,
    dollars_per_hour=0.0,
)
SMALL = (("identity", 1, 500, 5), ("spelling", 1, 60, 20), ("arithmetic", 1, 60, 20))


def make_job(directory, *, seed=42, datasets=SMALL):
    job = Job(
        directory=directory,
        stage="task_data",
        entry="nanochat_core.data.task_data",
        fingerprint="f" * 64,
        config={
            "seed": seed,
            "task_data": {
                "datasets": [
                    {"name": name, "grade": grade, "num_train": train, "num_test": test}
                    for name, grade, train, test in datasets
                ]
            },
        },
        inputs={},
        resources=RESOURCES,
    )
    job.output.mkdir(parents=True)
    return job


def digests(job):
    return {
        str(path.relative_to(job.output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(job.output.rglob("*"))
        if path.is_file()
    }


def test_every_dataset_is_written_and_counted(tmp_path):
    job = make_job(tmp_path)
    metrics = task_data.run(job)
    described = json.loads((job.output / "task_data.json").read_text())
    assert described["format"] == task_data.FORMAT
    assert list(described["datasets"]) == ["identity", "spelling", "arithmetic"]
    assert described["datasets"]["spelling"] == {"grade": 1, "train": 60, "test": 20}
    for name, counts in described["datasets"].items():
        for split in ("train", "test"):
            assert len(open_task(name, job.output, split)) == counts[split]
            assert metrics[f"{name}_{split}"] == counts[split]
    assert 60 <= described["datasets"]["identity"]["train"] < 500


def test_the_seed_decides_every_byte(tmp_path):
    jobs = [make_job(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2))]
    for job in jobs:
        task_data.run(job)
    first, again, other = map(digests, jobs)
    assert first == again
    assert first["spelling/train.jsonl"] != other["spelling/train.jsonl"]
    assert first.keys() == {
        "task_data.json",
        *(f"{n}/{s}.jsonl" for n, *_ in SMALL for s in ("train", "test")),
    }


def test_a_job_that_was_killed_half_way_is_repeated_over_its_own_files(tmp_path):
    job = make_job(tmp_path)
    (job.output / "spelling").mkdir()
    (job.output / "spelling" / "train.jsonl").write_text('{"messages": [')
    task_data.run(job)
    whole = make_job(tmp_path / "whole")
    task_data.run(whole)
    assert digests(job) == digests(whole)


@pytest.mark.parametrize("grade", [1, 2, 3])
def test_every_written_example_is_right_by_its_own_answer_and_by_our_calculator(tmp_path, grade):
    job = make_job(
        tmp_path, datasets=(("spelling", grade, 400, 100), ("arithmetic", grade, 400, 100))
    )
    task_data.run(job)
    for name in ("spelling", "arithmetic"):
        for split in ("train", "test"):
            for conversation in open_task(name, job.output, split):
                content = conversation["messages"][-1]["content"]
                assert is_correct(name, conversation, text_of(content))
                calls = [] if isinstance(content, str) else content
                for call, result in itertools.pairwise(calls):
                    if call["type"] == "python":
                        assert result == {
                            "type": "python_output",
                            "text": calculate(call["text"]),
                        }


def test_another_seed_of_the_test_set_still_asks_nothing_of_training(tmp_path):
    jobs = [make_job(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    for job in jobs:
        task_data.run(job)
    for name in ("spelling", "arithmetic"):
        assert is_gradable(name)
        train = {prompt_key(c) for c in open_task(name, jobs[0].output, "train")}
        assert not train & {prompt_key(c) for c in open_task(name, jobs[1].output, "test")}


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ((("gsm9k", 1, 1, 1),), "there is no task 'gsm9k'"),
        ((("spelling", 9, 1, 1),), "spelling has no grade 9"),
        ((("spelling", 1, 1, 1), ("spelling", 2, 1, 1)), "names 'spelling' 2 times"),
    ],
)
def test_a_dataset_that_cannot_be_made_is_refused(tmp_path, datasets, message):
    with pytest.raises(DataError, match=message):
        task_data.run(make_job(tmp_path, datasets=datasets))


def test_a_prompt_in_both_splits_is_refused():
    def ask(text):
        return {"messages": [{"role": "user", "content": text}]}

    task_data.check_disjoint("t", [ask("a"), ask("b")], [ask("c")])
    with pytest.raises(DataError, match=r"1 prompts of task 't' are in both .*'user: b'"):
        task_data.check_disjoint("t", [ask("a"), ask("b")], [ask("c"), ask("b")])


def test_task_data_needs_no_torch():
    code = (
        "import sys, nanochat_core.data.task_data, nanochat_core.data.chat_rows, "
        "nanochat_core.tokenizer.chat; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
