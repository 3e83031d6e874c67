import copy
import dataclasses
import itertools
import json
import random
import re
import shutil

import pyarrow.parquet as pq
import pytest
import torch

from flows.profiles import open_profile
from infra.launch.torchrun import run_job
from nanochat_core.config import EvalTaskConfig
from nanochat_core.engine.engine import Engine
from nanochat_core.errors import ConfigError, DataError, StageError
from nanochat_core.evaluate import chat
from nanochat_core.evaluate import generate as generate_answers
from nanochat_core.evaluate.generate import accuracy, converse, greedy_answers
from nanochat_core.evaluate.multiple_choice import likeliest_letters
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.progress import read_events
from nanochat_core.tokenizer.chat import parse_answer, render_for_completion
from nanochat_core.train import rl
from tasks.base import Task, TaskError, text_of
from tasks.kinds import multiple_choice
from tasks.kinds.files import open_task
from tasks.registry import are_correct, grader_of
from tasks.sandbox import run
from tests.support.nanochat_core.random_gpt import make_writer
from tests.support.tasks.example_files import write_examples

pytestmark = pytest.mark.torch


def config_of(*tasks):
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


def write_always(engine, text):
    """Turn the model into one that writes `text` and ends."""
    start, end = map(engine.tokenizer.special, ("<|assistant_start|>", "<|assistant_end|>"))
    make_writer(engine.model, [start, *engine.tokenizer.encode(text), end])


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(count):
    """With three to five lettered choices, one of them longer than the model's windows."""
    made, rng = list[dict](), random.Random(0)
    for i in range(count):
        letters = rng.sample("ABCDEFGHIJ1234", 3 + i % 3)
        choices = [f"{'long ' * (40 * (i % 5 == 0))}choice {i * j}" for j in range(len(letters))]
        answer = letters[i % len(letters)]
        made.append(multiple_choice.make_conversation(f"What is {i}?", letters, choices, answer))
    return made


@pytest.fixture(scope="module")
def many_tasks_dir(task_data_dir, tmp_path_factory):
    """With questions of lettered choices besides, programs to be written, a task that has no right
    answers and one that has no examples."""
    directory = tmp_path_factory.mktemp("tasks") / "task_data"
    shutil.copytree(task_data_dir, directory)
    program = {
        "messages": [
            {"role": "user", "content": "def one():"},
            {"role": "assistant", "content": "def one():\n    return 1"},
        ],
        "entry_point": "one",
        "test": "def check(one):\n    assert one() == 1",
    }
    open_ended = {"messages": [{"role": "user", "content": "x"}]}
    for name, examples in (
        *(("arc_easy", questions(40)), ("humaneval", [program])),
        *(("identity", [open_ended]), ("spelling_bee", [])),
    ):
        (directory / name).mkdir()
        for split in ("train", "test"):
            write_examples(directory / name / f"{split}.jsonl", examples)
    return directory


def test_every_example_is_answered_graded_and_counted(make, model, tokenizer, task_data_dir):
    job = make(("spelling", 3), ("arithmetic", 99))
    metrics = chat.run(job)
    scores = json.loads((job.output / "scores.json").read_text())
    examples = pq.read_table(job.output / "examples.parquet").to_pylist()
    assert {name: s["total"] for name, s in scores["tasks"].items()} == {
        "spelling": 3,
        "arithmetic": 5,
    }
    for name, found in scores["tasks"].items():
        of_task = [example for example in examples if example["task"] == name]
        assert found["correct"] == sum(example["correct"] for example in of_task)
        assert found["accuracy"] == found["correct"] / found["total"] == metrics[name]
        assert found["low"] <= found["accuracy"] <= found["high"]
        assert found["centred"] == found["accuracy"]
    mean = sum(s["accuracy"] for s in scores["tasks"].values()) / 2
    assert scores["chatcore"] == metrics["chatcore"] == mean
    low, high = scores["intervals"]["chatcore"]
    assert low <= mean < high == metrics["chatcore_high"]
    assert scores["failed"] == {}
    engine = Engine(model, tokenizer)
    task = open_task("spelling", task_data_dir, "test")
    for example, record in zip(task.first(3).examples, examples, strict=False):
        prompt = render_for_completion(tokenizer, example)
        results, _ = engine.generate_batch(prompt, max_tokens=12, temperature=0.0)
        answer = parse_answer(tokenizer, results[0][len(prompt) :])
        assert record["prompt"] == example["messages"][0]["content"]
        assert record["answer"] == answer
        assert record["correct"] == grader_of("spelling").is_correct(example, answer)
        assert record["expected"]
    [sample] = records(job.output / "samples.jsonl")
    assert sample["prompt"] == "Who are you?"
    steps = [e["step"] for e in read_events(job.events) if e["kind"] == "step"]
    assert steps == [3, 8]


def test_accuracy_is_the_share_of_right_answers(model, tokenizer):
    engine = Engine(copy.deepcopy(model), tokenizer)
    write_always(engine, "#### 2")
    right = {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}
    other = {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}
    task = Task(name="arithmetic", split="test", examples=[right, other, right, right])
    [answer] = greedy_answers(engine, [right], max_new_tokens=9)
    assert answer == "#### 2"
    assert accuracy(engine, task, max_new_tokens=9, world=ALONE) == 0.75


def test_every_turn_is_answered_after_the_models_own_answers_and_all_must_be_right(
    model, tokenizer
):
    engine = Engine(copy.deepcopy(model), tokenizer)
    write_always(engine, "#### 2")

    def of_sums(*answers):
        question, expected = {"role": "user", "content": "?"}, {"role": "assistant", "content": "3"}
        turns = [{"kind": "sum", "answer": answer} for answer in answers]
        return {"messages": [question, expected] * len(answers), "turns": turns}

    examples = [of_sums("2", "3"), of_sums("2", "2"), of_sums("2")]
    [(_, first), (asked, second)] = converse(engine, examples, max_new_tokens=9)[0]
    assert first == second == "#### 2"
    assert [text_of(m["content"]) for m in asked["messages"]] == ["?", "#### 2", "?"]

    task = Task(name="conversation", split="test", examples=examples)
    entry = EvalTaskConfig(name=task.name, max_examples=9, max_new_tokens=9)
    found = chat.evaluate_block(lambda *of: chat.answer_turns(engine, *of), task, range(3), entry)
    assert [record["correct"] for record in found] == [False, True, True]
    assert (found[0]["prompt"], found[0]["expected"]) == ("?\n?", "3\n3")
    [(name, share)] = chat.turn_scores(task.name, found)
    assert (name, share["correct"], share["total"]) == ("conversation: sum", 4, 5)


@pytest.mark.parametrize(
    "wrote",
    [
        "<<7+5=12>>#### 12",
        "<|python_start|>7+5<|python_end|><|output_start|>12<|output_end|>#### 12",
        "<|python_start|>5+<|python_end|>#### 12",
        "<|python_start|>a=b<|python_end|>x",
    ],
)
def test_the_model_sees_the_very_tokens_of_its_earlier_answers(
    model, tokenizer, monkeypatch, wrote
):
    special = re.compile(r"(<\|\w+\|>)")
    ids = []
    for piece in special.split(wrote):
        ids += [tokenizer.special(piece)] if special.match(piece) else tokenizer.encode(piece)
    prompts = []

    def complete(engine, given, *, max_tokens):
        prompts.extend(given)
        return [ids] * len(given)

    monkeypatch.setattr(generate_answers, "complete_greedily", complete)
    question, expected = {"role": "user", "content": "?"}, {"role": "assistant", "content": "3"}
    example = {"messages": [question, expected] * 2, "turns": [{"kind": "sum"}] * 2}
    converse(Engine(model, tokenizer), [example], max_new_tokens=99)
    first, second = prompts
    assert second[: len(first) + len(ids)] == first + ids


def test_a_conversation_that_fills_the_context_is_answered_by_nothing(model, tokenizer):
    engine = Engine(model, tokenizer)
    short, long = (
        {"messages": [{"role": "user", "content": "x" * length}]} for length in (10, 300)
    )
    answers = greedy_answers(engine, [long, short, long], max_new_tokens=5)
    assert answers[0] == answers[2] == ""
    assert answers[1] == greedy_answers(engine, [short], max_new_tokens=5)[0] != ""


def test_the_answer_to_lettered_choices_is_the_likeliest_letter(model, tokenizer):
    asked = questions(40)
    model = copy.deepcopy(model)
    with torch.no_grad():  # what came before counts for more than the last token
        for block in model.transformer.h:
            block.attn.c_proj.weight *= 20
    expected = []
    for conversation in asked:
        prompt = render_for_completion(tokenizer, conversation)
        with torch.no_grad():
            logits = model(torch.tensor([prompt]))[0, -1]
        ids = [tokenizer.encode(letter)[0] for letter in conversation["letters"]]
        expected.append(conversation["letters"][int(logits[ids].argmax())])
    assert likeliest_letters(model, tokenizer, asked) == expected
    assert len(set(expected)) > 3
    assert max(len(render_for_completion(tokenizer, c)) for c in asked) > model.config.sequence_len
    assert likeliest_letters(model, tokenizer, []) == []


def test_a_letter_that_is_no_token_is_named(model, tokenizer):
    conversation = multiple_choice.make_conversation("?", ["AB", "C"], ["x", "y"], "C")
    with pytest.raises(DataError, match="'AB' is 2 tokens"):
        likeliest_letters(model, tokenizer, [conversation])


@pytest.mark.parametrize("baseline", [0.25, 0.5])  # a task of another package may have its own
def test_chatcore_is_the_mean_above_guessing(make, many_tasks_dir, monkeypatch, baseline):
    of_pairs = {"arc_easy": multiple_choice.grader(baseline=baseline)} if baseline == 0.5 else {}
    monkeypatch.setattr(chat, "grader_of", lambda name: of_pairs.get(name) or grader_of(name))
    job = make(("spelling", 5), ("arc_easy", 40), task_data=many_tasks_dir)
    metrics = chat.run(job)
    scores = json.loads((job.output / "scores.json").read_text())
    above = (metrics["arc_easy"] - baseline) / (1 - baseline)
    assert scores["tasks"]["arc_easy"]["centred"] == pytest.approx(above)
    assert scores["chatcore"] == pytest.approx((metrics["spelling"] + above) / 2)
    rows = pq.read_table(job.output / "examples.parquet").to_pylist()
    assert {(r["correct"], r["answer"] == r["expected"]) for r in rows[5:]} == {(1, 1), (0, 0)}
    assert [r["place"] for r in rows] == [*range(5), *range(40)]


def test_a_task_whose_data_is_of_no_use_fails_alone_and_all_of_them_the_stage(make, many_tasks_dir):
    useless = {"mmlu": "mmlu", "identity": "no right answers"}
    useless["spelling_bee"] = "no examples of split 'test'"
    tasks = (("spelling", 5), *((name, 3) for name in useless))
    job = make(*tasks, task_data=many_tasks_dir)
    metrics = chat.run(job)
    scores = json.loads((job.output / "scores.json").read_text())
    assert list(scores["tasks"]) == ["spelling"]
    assert scores["chatcore"] is None
    assert "chatcore" not in metrics
    assert scores["failed"].keys() == useless.keys()
    texts = [e["text"] for e in read_events(job.events) if e["kind"] == "message"]
    for name, reason in scores["failed"].items():
        assert useless[name] in reason == metrics[f"{name}_failed"]
        assert str(many_tasks_dir) not in reason
        assert f"{name} could not be evaluated: {reason}" in texts
    assert sum(" in fp32 (" in text for text in texts) == 1  # which runner answers, and why it
    with pytest.raises(DataError, match="mmlu"):
        chat.run(make(*tasks[1:], name="all", task_data=many_tasks_dir))


@pytest.fixture
def no_sandbox(monkeypatch):
    """A machine where no wall can be put up: not one of the programs, and a kernel without any."""
    monkeypatch.setattr(run, "find_backends", lambda: iter(["nothing is installed"]))
    run.protections.cache_clear()
    yield
    run.protections.cache_clear()


def test_a_machine_without_a_sandbox_fails_the_stage_before_any_task_is_asked(
    make, many_tasks_dir, no_sandbox
):
    job = make(("spelling", 5), ("humaneval", 1), task_data=many_tasks_dir)
    with pytest.raises(StageError, match=r"'humaneval' cannot be graded .*installed") as e:
        chat.run(job)
    assert "nanochat doctor" in str(e.value.hint)
    assert not job.events.exists()  # no example was asked
    assert not list(job.output.iterdir())
    chat.run(make(("spelling", 5), name="without", task_data=many_tasks_dir))  # it needs none


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("humaneval", StageError, "'humaneval' cannot be graded on this machine"),
        ("spelling_bee", DataError, "no examples of split 'train'"),
    ],
)
def test_reinforcement_needs_a_sandbox_for_programs_and_examples(
    make, many_tasks_dir, no_sandbox, task, error, message
):
    config = dataclasses.replace(open_profile("tiny").run.rl, task=task)
    with pytest.raises(error, match=message):
        rl.open_questions(make(("spelling", 5), task_data=many_tasks_dir), config)


def test_a_machine_that_loses_its_sandbox_publishes_no_score(make, many_tasks_dir, monkeypatch):
    def refuse(name, graded):
        if name == "humaneval":
            raise TaskError("no sandbox here")
        return are_correct(name, graded)

    monkeypatch.setattr("nanochat_core.evaluate.generate.are_correct", refuse)
    job = make(("humaneval", 1), ("spelling", 5), task_data=many_tasks_dir)
    with pytest.raises(StageError, match="cannot be graded on this machine: no sandbox here"):
        chat.run(job)
    assert not list(job.output.iterdir())


def test_what_is_no_fault_of_a_task_ends_the_stage(make, many_tasks_dir, monkeypatch):
    def refuse(engine, examples, *, max_new_tokens):
        raise ConfigError("too little memory")

    monkeypatch.setattr(chat, "greedy_answers", refuse)
    with pytest.raises(ConfigError, match="too little memory"):
        chat.run(make(("arc_easy", 3), ("spelling", 5), task_data=many_tasks_dir))


def test_two_processes_find_what_one_finds(make, many_tasks_dir):
    tasks = (("spelling", 5), ("arithmetic", 5), ("arc_easy", 40), ("mmlu", 3))
    one, two = (make(*tasks, name=name, task_data=many_tasks_dir) for name in ("one", "two"))
    chat.run(one)
    run_job(two, processes=2, on_event=lambda event: None)
    for name in ("scores.json", "samples.jsonl", "examples.parquet"):
        alone, together = ((job.output / name).read_bytes() for job in (one, two))
        assert alone == together, name


def test_the_suites_digest_depends_on_what_was_asked(make, many_tasks_dir, tmp_path):
    def digest(*tasks, task_data=many_tasks_dir):
        job = make(*tasks, name=f"job-{next(numbers)}", task_data=task_data)
        return chat.suite_digest(job, chat.ChatEvalConfig.from_tree(job.config["chat_eval"]))

    numbers = itertools.count()
    others = [(("spelling", 4),), (("spelling", 5), ("arc_easy", 1)), (("arithmetic", 5),)]
    changed = shutil.copytree(many_tasks_dir, tmp_path / "changed")
    with (changed / "spelling" / "test.jsonl").open("a") as file:
        file.write("\n")
    found = [digest(("spelling", 5)), digest(("spelling", 5), task_data=changed)]
    found += [digest(*tasks) for tasks in others]
    assert len(set(found)) == len(found)
    assert digest(("spelling", 5)) == found[0]
