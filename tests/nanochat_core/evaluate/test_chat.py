import copy
import itertools
import json
import math
import shutil

import pytest
import torch

from nanochat_core.engine.engine import Engine
from nanochat_core.errors import DataError
from nanochat_core.evaluate import chat
from nanochat_core.evaluate.generate import accuracy, greedy_answers
from nanochat_core.runtime.distributed import World
from nanochat_core.runtime.progress import read_events
from nanochat_core.tokenizer.chat import parse_answer, render_for_completion
from tasks.base import Task
from tasks.files import open_task
from tasks.registry import is_correct

pytestmark = pytest.mark.torch


def config_of(*tasks: tuple[str, int]) -> dict:
    return {
        "chat_eval": {
            "tasks": [
                {"name": name, "max_examples": most, "max_new_tokens": 12} for name, most in tasks
            ],
            "prompts": ["Who are you?"],
        }
    }


@pytest.fixture
def make(make_job, model_dir, task_data_dir):
    def make_chat_job(*tasks, name="chat_eval", task_data=task_data_dir):
        inputs = {"sft": model_dir, "task_data": task_data}
        return make_job(name, "nanochat_core.evaluate.chat", inputs, config_of(*tasks))

    return make_chat_job


def write_always(engine: Engine, text: str) -> None:
    """Give every token a fixed successor, so that the model writes `text` and ends."""
    tokenizer = engine.tokenizer
    start, end = map(tokenizer.special, ("<|assistant_start|>", "<|assistant_end|>"))
    codes = torch.randn(tokenizer.vocab_size, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
        engine.model.resid_lambdas.fill_(1.0)
        engine.model.transformer.wte.weight[: len(codes)] = codes
        for token, successor in itertools.pairwise([start, *tokenizer.encode(text), end]):
            engine.model.lm_head.weight[successor] = 0.3 * codes[token]


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_example_is_answered_graded_and_counted(make, model, tokenizer, task_data_dir):
    job = make(("spelling", 3), ("arithmetic", 99))
    metrics = chat.run(job)
    scores = json.loads((job.output / "scores.json").read_text())
    examples = records(job.output / "examples.jsonl")
    assert {name: s["total"] for name, s in scores["tasks"].items()} == {
        "spelling": 3,
        "arithmetic": 5,
    }
    for name, found in scores["tasks"].items():
        of_task = [example for example in examples if example["task"] == name]
        assert found["correct"] == sum(example["correct"] for example in of_task)
        assert found["accuracy"] == found["correct"] / found["total"] == metrics[name]
        assert found["low"] <= found["accuracy"] <= found["high"]
    mean = sum(s["accuracy"] for s in scores["tasks"].values()) / 2
    assert scores["chatcore"] == metrics["chatcore"] == mean
    engine = Engine(model, tokenizer)
    task = open_task("spelling", task_data_dir, "test")
    for example, record in zip(task.first(3).examples, examples, strict=False):
        prompt = render_for_completion(tokenizer, example)
        results, _ = engine.generate_batch(prompt, max_tokens=12, temperature=0.0)
        answer = parse_answer(tokenizer, results[0][len(prompt) :])
        assert record["prompt"] == example["messages"][0]["content"]
        assert record["answer"] == answer
        assert record["correct"] == is_correct("spelling", example, answer)
        assert record["expected"]
    [sample] = records(job.output / "samples.jsonl")
    assert sample["prompt"] == "Who are you?"
    steps = [e["step"] for e in read_events(job.events) if e["kind"] == "step"]
    assert steps == [3, 8]


def test_two_runs_leave_the_same_bytes(make):
    jobs = [make(("spelling", 2), name=name) for name in ("first", "second")]
    for job in jobs:
        chat.run(job)
    for name in ("scores.json", "samples.jsonl", "examples.jsonl"):
        first, second = ((job.output / name).read_bytes() for job in jobs)
        assert first == second


def test_accuracy_is_the_share_of_right_answers(model, tokenizer):
    engine = Engine(copy.deepcopy(model), tokenizer)
    write_always(engine, "#### 2")
    right = {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
    other = {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}
    task = Task(name="arithmetic", split="test", examples=[right, other, right, right])
    [answer] = greedy_answers(engine, [right], max_new_tokens=9)
    assert answer == "#### 2"
    alone = World(rank=0, local_rank=0, size=1)
    assert accuracy(engine, task, max_new_tokens=9, world=alone) == 0.75


def test_a_conversation_that_fills_the_context_is_answered_by_nothing(model, tokenizer):
    engine = Engine(model, tokenizer)
    short, long = (
        {"messages": [{"role": "user", "content": "x" * length}]} for length in (10, 300)
    )
    answers = greedy_answers(engine, [long, short, long], max_new_tokens=5)
    assert answers[0] == answers[2] == ""
    assert answers[1] == greedy_answers(engine, [short], max_new_tokens=5)[0] != ""


def test_a_task_without_data_or_without_right_answers_is_named(make, task_data_dir, tmp_path):
    with pytest.raises(DataError, match="spelling"):
        chat.run(make(("spelling", 3), name="a", task_data=tmp_path))
    folder = tmp_path / "with_identity"
    shutil.copytree(task_data_dir, folder)
    (folder / "identity").mkdir()
    (folder / "identity" / "test.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n"
    )
    with pytest.raises(DataError, match="no right answers"):
        chat.run(make(("identity", 3), name="b", task_data=folder))


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (10, 10), (5, 10), (81, 263), (1, 2)])
def test_the_intervals_ends_are_1_96_deviations_away(correct, total):
    share = correct / total
    low, high = chat.wilson_interval(correct, total)
    assert 0 <= low <= share <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        assert abs(share - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(
            1.96, abs=1e-4
        )


def test_the_interval_of_81_in_263_is_the_published_one():
    low, high = chat.wilson_interval(81, 263)  # Newcombe 1998, table I, method 3
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_nothing_seen_says_nothing():
    assert chat.wilson_interval(0, 0) == (0.0, 1.0)
