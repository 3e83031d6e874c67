"""Stage `chat_eval`: how many test questions of each task the chat model answers correctly.

Answers are greedy and graded by the tasks. Writes

    scores.json     {format, tasks: {name: {accuracy, correct, total, low, high}}, chatcore}
    examples.jsonl  {task, prompt, answer, expected, correct}, every example
    samples.jsonl   {prompt, text}, answers to the prompts of the config

`low` and `high` are a 95 % interval of the accuracy. `chatcore` is the mean accuracy of the tasks.
"""

import math
from typing import Any

from nanochat_core.config import ChatEvalConfig, EvalTaskConfig
from nanochat_core.data.examples import open_task
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate.generate import check_gradable, greedy_answers
from nanochat_core.evaluate.records import write_records
from nanochat_core.job import Job, write_json
from nanochat_core.model.checkpoint import load_model
from nanochat_core.runtime.device import open_device
from nanochat_core.runtime.distributed import open_world
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.base import Task, prompt_of, text_of
from tasks.registry import is_correct

FORMAT = 1
BATCH = 256  # examples between two progress events
DEVIATIONS = 1.959964  # of a normal distribution, around 95 % of it


def run(job: Job) -> dict[str, Any]:
    """Judge the chat model. One rank does the work: the others have nothing to add."""
    config = ChatEvalConfig.from_tree(job.config["chat_eval"])
    world = open_world(job.resources.device)
    device = open_device(job.resources, local_rank=world.local_rank)
    if not world.is_first:
        return {}
    progress = Progress(job.events)
    engine = Engine(
        load_model(job.model_input, device), Tokenizer.load(job.model_input / "tokenizer")
    )
    tasks = [(entry, _open(job, entry)) for entry in config.tasks]
    progress.start(sum(len(task) for _, task in tasks), unit="example")
    scores: dict[str, dict[str, float]] = {}
    lines: list[dict[str, Any]] = []
    for entry, task in tasks:
        found: list[dict[str, Any]] = []
        for first in range(0, len(task), BATCH):
            found += judge(engine, task, range(first, min(first + BATCH, len(task))), entry)
            correct = sum(line["correct"] for line in found)
            progress.step(len(lines) + len(found), **{task.name: correct / len(found)})
        scores[entry.name] = score([line["correct"] for line in found])
        lines += found
    chatcore = sum(s["accuracy"] for s in scores.values()) / max(len(scores), 1)
    write_records(job.output / "examples.jsonl", lines)
    write_records(job.output / "samples.jsonl", answer_prompts(engine, config))
    write_json(
        job.output / "scores.json", {"format": FORMAT, "tasks": scores, "chatcore": chatcore}
    )
    return {"chatcore": chatcore, **{name: s["accuracy"] for name, s in scores.items()}}


def judge(
    engine: Engine, task: Task, indices: range, entry: EvalTaskConfig
) -> list[dict[str, Any]]:
    """The lines of examples.jsonl of some examples of a task."""
    examples = [task[i] for i in indices]
    answers = greedy_answers(engine, examples, max_new_tokens=entry.max_new_tokens)
    return [
        {
            "task": task.name,
            "prompt": text_of(prompt_of(example)["messages"][-1]["content"]),
            "answer": answer,
            "expected": text_of(example["messages"][-1]["content"]),
            "correct": is_correct(task.name, example, answer),
        }
        for example, answer in zip(examples, answers, strict=True)
    ]


def answer_prompts(engine: Engine, config: ChatEvalConfig) -> list[dict[str, Any]]:
    """The lines of samples.jsonl; answers are as long as the longest that a task allows."""
    conversations = [{"messages": [{"role": "user", "content": p}]} for p in config.prompts]
    longest = max((entry.max_new_tokens for entry in config.tasks), default=256)
    answers = greedy_answers(engine, conversations, max_new_tokens=longest)
    return [
        {"prompt": prompt, "text": answer}
        for prompt, answer in zip(config.prompts, answers, strict=True)
    ]


def score(verdicts: list[bool]) -> dict[str, float]:
    """Accuracy with its 95 % interval."""
    correct, total = sum(verdicts), len(verdicts)
    low, high = wilson_interval(correct, total)
    return {
        "accuracy": correct / max(total, 1),
        "correct": correct,
        "total": total,
        "low": low,
        "high": high,
    }


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """95 % interval of a share of which `correct` of `total` was seen (Wilson 1927).

    It stays inside 0..1 and does not shrink to a point at 0 or all correct; (0, 1) of nothing.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = correct / total, DEVIATIONS**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    spread = share * (1 - share) / total + z2 / (4 * total**2)
    half = DEVIATIONS * math.sqrt(spread) / (1 + z2 / total)
    # Exactly 0 and 1 at the ends, where rounding would leave a share outside its own interval.
    return 0.0 if correct == 0 else centre - half, 1.0 if correct == total else centre + half


def _open(job: Job, entry: EvalTaskConfig) -> Task:
    task = open_task(entry.name, job.inputs["task_data"], "test")
    check_gradable(task)
    return task.first(entry.max_examples)
