"""Stage `chat_eval`: how many test questions of each task the chat model answers correctly.

The answer to a question with lettered choices is the likeliest letter (see multiple_choice.py), to
others the model's greedy completion; the tasks grade it. Writes

    scores.json       {format, tasks: {name: {accuracy, correct, total, low, high, centred,
                       baseline}}, turns: {name: ...}, failed: {name: reason}, chatcore,
                       intervals: {chatcore: [low, high]}, suite}
    examples.parquet  task, place, prompt, answer, expected, correct: every example
    samples.jsonl     {prompt, text}, answers to the prompts of the config

`low` and `high` are a 95 % interval, see intervals.py. `baseline` is the accuracy of guessing,
`centred` the accuracy on a scale from guessing (0) to all right (1), `chatcore` the mean of that
over the tasks. An example with several "turns" is right if every turn is, the model's own earlier
answers in view; `turns` has the share of right turns of each kind, as "task: kind". A task whose
data cannot be used is in `failed`, and `chatcore` is null: a mean without it would be another
metric. If the machine lacks something, such as a sandbox, the stage fails before the first
question. `suite` is the digest of the questions: only scores of the same suite are comparable.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from nanochat_core.config import ChatEvalConfig, EvalTaskConfig
from nanochat_core.data.conversations.examples import open_examples
from nanochat_core.engine.engine import Engine
from nanochat_core.errors import DataError
from nanochat_core.evaluate.generate import (
    cannot_grade,
    check_gradable,
    check_machine,
    converse,
    grade,
    greedy_answers,
)
from nanochat_core.evaluate.intervals import Interval, centred, mean_of, metrics_of, share_of
from nanochat_core.evaluate.multiple_choice import has_letters, likeliest_letters
from nanochat_core.evaluate.records import write_samples, write_table
from nanochat_core.job import Job, write_json
from nanochat_core.model.checkpoint import load_model
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import World, open_world
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.base import Conversation, Task, TaskError, prompt_of, text_of
from tasks.registry import grader_of

FORMAT = 2
BLOCK = 256  # examples per unit of work, independent of the number of ranks
Record: TypeAlias = dict[str, Any]  # a row of examples.parquet
Failed: TypeAlias = dict[str, str]  # task -> why it could not be evaluated
Answered: TypeAlias = list[list[tuple[Conversation, str]]]  # of each example its turns
# Answers some examples; the second argument is the most tokens of an answer.
Ask: TypeAlias = Callable[[Sequence[Conversation], int], Answered]
EXAMPLES = pa.schema(
    [
        ("task", pa.string()),
        ("place", pa.int32()),  # index in the task's test examples
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("expected", pa.string()),
        ("correct", pa.bool_()),
    ]
)


def run(job: Job) -> dict[str, Any]:
    """Evaluate the chat model; the ranks share the questions. Raises DataError if every task fails,
    StageError if this machine cannot grade one, and ModelError if the model cannot be loaded."""
    config = ChatEvalConfig.from_tree(job.config["chat_eval"])
    device = open_device(job.resources)
    world = open_world(device)
    progress = Progress(job.events, active=world.is_first)
    tasks, failed = open_tasks(job, config)
    engine = Engine(
        load_model(job.model_input, device),
        Tokenizer.load(job.model_input / "tokenizer"),
        on_choice=lambda choice: progress.message(f"answers: {choice}"),
    )
    ask = partial(answer_turns, engine)
    records, failed = evaluate_tasks(ask, tasks, failed, config, world, progress)
    metrics = write_scores(job, config, records, failed, world, progress)
    if world.is_first:
        write_samples(job.output / "samples.jsonl", config.prompts, answer_prompts(engine, config))
    return metrics


def write_scores(
    job: Job,
    config: ChatEvalConfig,
    records: Mapping[str, list[Record]],
    failed: Failed,
    world: World,
    progress: Progress,
    *,
    is_whole: bool = True,
) -> dict[str, Any]:
    """Write scores.json and examples.parquet on the first rank; return the metrics there.

    Without `is_whole` only some of the questions were asked: there is no mean and no suite. Raises
    DataError if every task failed.
    """
    # Paths of this machine are cut out, so that equal failures give equal artifacts.
    place = f"{job.inputs['task_data']}/"
    failed = {name: reason.replace(place, "") for name, reason in failed.items()}
    for name, reason in failed.items():
        progress.message(f"{name} could not be evaluated: {reason}")
    if config.tasks and not records:
        raise DataError(next(iter(failed.values())), hint="no task could be evaluated")
    if not world.is_first:
        return {}
    scores = {name: share_of_right(rows) for name, rows in records.items()}
    chatcore = {"chatcore": chatcore_of(scores)} if scores and is_whole and not failed else {}
    rows = [row for some in records.values() for row in some]
    write_table(job.output / "examples.parquet", rows, EXAMPLES)
    tree = {
        "format": FORMAT,
        "tasks": {name: _task_tree(name, rows) for name, rows in records.items()},
        "turns": {k: v for name, rows in records.items() for k, v in turn_scores(name, rows)},
        "failed": failed,
        "chatcore": None,
        **{name: score.value for name, score in chatcore.items()},
        "intervals": {name: [score.low, score.high] for name, score in chatcore.items()},
        "suite": suite_digest(job, config) if is_whole else None,
    }
    write_json(job.output / "scores.json", tree)
    reasons = {f"{name}_failed": reason for name, reason in failed.items()}
    return metrics_of({**chatcore, **scores}) | reasons


def open_tasks(job: Job, config: ChatEvalConfig) -> tuple[dict[str, Task], Failed]:
    """Open every task. Raises StageError when this machine cannot grade one of them."""
    tasks: dict[str, Task] = {}
    failed: Failed = {}
    for entry in config.tasks:
        try:
            tasks[entry.name] = _open(job, entry)
        except DataError as error:
            failed[entry.name] = str(error)
    # Before the first question: a missing sandbox should not cost an hour of answers.
    for name in tasks:
        check_machine(name)
    return tasks, failed


def evaluate_tasks(
    ask: Ask,
    tasks: Mapping[str, Task],
    failed: Failed,
    config: ChatEvalConfig,
    world: World,
    progress: Progress,
) -> tuple[dict[str, list[Record]], Failed]:
    """Return every task's records, the same on every rank. A task fails if it fails on any rank.

    `failed` are the tasks that could not be opened; those that fail here are added.
    Errors that are not a task's fault, such as too little memory for the engine, end the stage.
    """
    failed = dict(failed)
    blocks = [
        (entry, range(first, min(first + BLOCK, len(tasks[entry.name]))))
        for entry in config.tasks
        if entry.name in tasks
        for first in range(0, len(tasks[entry.name]), BLOCK)
    ]
    total = sum(map(len, tasks.values()))
    progress.start(total, unit="example")
    own: dict[str, list[Record]] = {name: [] for name in tasks}
    done = 0
    for entry, places in blocks[world.rank :: world.size]:
        name = entry.name
        done += len(places) * world.size  # an estimate: other ranks may be faster or slower
        if name in failed:
            continue
        # A failing task is recorded, not raised: other ranks wait for this one in `gather`.
        try:
            own[name] += evaluate_block(ask, tasks[name], places, entry)
        except DataError as error:
            failed[name] = str(error)
            continue
        share = sum(record["correct"] for record in own[name]) / len(own[name])
        progress.step(min(done, total), **{name: share})
    everyone = world.gather({"records": own, "failed": failed})
    # Reversed, so that the reason of the lowest rank wins.
    merged = {k: reason for rank in reversed(everyone) for k, reason in rank["failed"].items()}
    failed = {entry.name: merged[entry.name] for entry in config.tasks if entry.name in merged}
    records = {
        name: sorted(
            (r for rank in everyone for r in rank["records"][name]), key=lambda r: r["place"]
        )
        for name in tasks
        if name not in failed
    }
    return records, failed


def evaluate_block(ask: Ask, task: Task, places: range, entry: EvalTaskConfig) -> list[Record]:
    """Answer and grade some examples of a task; return their rows of examples.parquet.

    Raises StageError if answers cannot be graded here, DataError if a prompt is unusable.
    """
    examples = [task[i] for i in places]
    turns = ask(examples, entry.max_new_tokens)
    try:
        correct = iter(grade(task.name, [turn for of_example in turns for turn in of_example]))
    except TaskError as error:  # the data was readable, so this machine lacks something
        raise cannot_grade(task.name, error) from error
    records: list[Record] = []
    for place, example, of_example in zip(places, examples, turns, strict=True):
        kinds = [(question.get("kind"), next(correct)) for question, _ in of_example]
        records.append(
            {
                "task": task.name,
                "place": place,
                "prompt": _in_lines(prompt_of(asked)["messages"][-1] for asked, _ in of_example),
                "answer": "\n".join(answer for _, answer in of_example),
                "expected": _in_lines(example["messages"][-2 * len(of_example) + 1 :: 2]),
                "correct": all(right for _, right in kinds),
                "turns": kinds if "turns" in example else [],
            }
        )
    return records


def _in_lines(messages: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(text_of(message["content"]) for message in messages)


def answer_turns(engine: Engine, examples: Sequence[Conversation], max_new_tokens: int) -> Answered:
    """Return each example's questions with the model's answers: one, or one a turn."""
    if all("turns" in example for example in examples):
        return converse(engine, examples, max_new_tokens=max_new_tokens)
    if all(map(has_letters, examples)):
        answers = likeliest_letters(engine.model, engine.tokenizer, examples)
    else:
        answers = greedy_answers(engine, examples, max_new_tokens=max_new_tokens)
    # Whole examples: the grader of lettered choices reads the right letter from the last message.
    return [[pair] for pair in zip(examples, answers, strict=True)]


def answer_prompts(engine: Engine, config: ChatEvalConfig) -> list[str]:
    """Return answers to the prompts, as long as the longest answer that a task allows."""
    conversations = [{"messages": [{"role": "user", "content": p}]} for p in config.prompts]
    longest = max((entry.max_new_tokens for entry in config.tasks), default=256)
    return greedy_answers(engine, conversations, max_new_tokens=longest)


def share_of_right(records: Sequence[Mapping[str, Any]]) -> Interval:
    """Return the accuracy of these answers."""
    return share_of(sum(record["correct"] for record in records), len(records))


def chatcore_of(scores: Mapping[str, Interval]) -> Interval:
    """Return the mean of the tasks' accuracies, each from guessing (0) to all right (1)."""
    return mean_of([centred(s, grader_of(name).baseline) for name, s in scores.items()])


def suite_digest(job: Job, config: ChatEvalConfig) -> str:
    """Return a digest (64 hex digits) of the examples and of the allowed length of answers."""
    digest = hashlib.sha256(f"chat {FORMAT}".encode())
    for entry in config.tasks:
        digest.update(json.dumps(entry.canonical(), sort_keys=True).encode())
        path = job.inputs["task_data"] / entry.name / "test.jsonl"
        digest.update(hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"-")
    return digest.hexdigest()


def _task_tree(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    score, baseline = share_of_right(records), grader_of(name).baseline
    return {
        **_share_tree([record["correct"] for record in records]),
        "centred": centred(score, baseline).value,
        "baseline": baseline,
    }


def turn_scores(
    name: str, records: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the share of right turns of each kind; nothing for examples of one turn."""
    turns = [turn for record in records for turn in record["turns"]]
    for kind in sorted({kind for kind, _ in turns}):
        yield f"{name}: {kind}", _share_tree([right for k, right in turns if k == kind])


def _share_tree(right: Sequence[bool]) -> dict[str, float]:
    score = share_of(sum(right), len(right))
    return {
        "accuracy": score.value,
        "correct": sum(right),
        "total": len(right),
        "low": score.low,
        "high": score.high,
    }


def _open(job: Job, entry: EvalTaskConfig) -> Task:
    task = open_examples(entry.name, job.inputs["task_data"], "test")
    check_gradable(task)
    # ChatCORE's scale needs the score of guessing, which is above 0 if there are choices.
    is_open = grader_of(entry.name).baseline > 0 or not has_letters(task[0])
    assert is_open, f"{entry.name} can be guessed"
    return task.first(entry.max_examples)
