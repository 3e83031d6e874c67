"""Generate a chat model's answers and measure their accuracy: greedy, or the best of k sampled ones
(pass@k)."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from nanochat_core.engine.engine import Engine
from nanochat_core.errors import DataError, StageError
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.tokenizer.chat import parse_answer, parse_parts, render_for_completion
from tasks.base import Conversation, Part, Task, TaskError, text_of
from tasks.registry import are_correct, find_grader, is_gradable

# A program may take 5 s, so this many on one CPU take less than the default `hang_seconds`.
GRADED_AT_ONCE = 64


def greedy_answers(
    engine: Engine, conversations: Sequence[Conversation], *, max_new_tokens: int
) -> list[str]:
    """Return the model's greedy answer to each conversation without its last assistant message.

    An answer has at most `max_new_tokens` tokens; calculator calls appear in the format that the
    graders of `tasks` read. The answer to a conversation that fills the model's context is "".
    """
    return list(map(text_of, _greedy_parts(engine, conversations, max_new_tokens=max_new_tokens)))


def _greedy_parts(
    engine: Engine, conversations: Sequence[Conversation], *, max_new_tokens: int
) -> list[list[Part]]:
    """Return `greedy_answers` as parts, which keep a call apart from text that looks like one."""
    prompts = [render_for_completion(engine.tokenizer, c) for c in conversations]
    answers: list[list[Part]] = [[] for _ in prompts]
    context = engine.model.config.sequence_len
    readable = [i for i, prompt in enumerate(prompts) if len(prompt) < context]
    found = complete_greedily(engine, [prompts[i] for i in readable], max_tokens=max_new_tokens)
    for i, ids in zip(readable, found, strict=True):
        answers[i] = parse_parts(engine.tokenizer, ids)
    return answers


def converse(
    engine: Engine, conversations: Sequence[Conversation], *, max_new_tokens: int
) -> list[list[tuple[Conversation, str]]]:
    """Let the model answer every turn of conversations whose key "turns" has the graders' keys.

    Returns for each conversation its turns: what a grader sees, and the greedy answer. A turn is
    answered with the model's own earlier answers in view, not the expected ones.
    """
    history: list[list[Any]] = [[] for _ in conversations]
    answered: list[list[tuple[Conversation, str]]] = [[] for _ in conversations]
    for turn in range(max((len(c["turns"]) for c in conversations), default=0)):
        open_ids = [i for i, c in enumerate(conversations) if turn < len(c["turns"])]
        for i in open_ids:
            history[i].append(conversations[i]["messages"][2 * turn])
        asked = [
            {**conversations[i]["turns"][turn], "messages": list(history[i])} for i in open_ids
        ]
        answers = _greedy_parts(engine, asked, max_new_tokens=max_new_tokens)
        for i, question, parts in zip(open_ids, asked, answers, strict=True):
            answered[i].append((question, text_of(parts)))
            history[i].append({"role": "assistant", "content": parts})
    return answered


def complete_greedily(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> list[Sequence[int]]:
    """Return the ids that continue each prompt, always the likeliest one."""
    groups = engine.complete(
        prompts,
        num_samples=1,
        max_tokens=max_tokens,
        temperature=0.0,
        top_k=None,
        seeds=[0] * len(prompts),  # unused: greedy decoding draws no random numbers
    )
    return [completion.ids for [completion] in groups]


def grade(name: str, graded: Sequence[tuple[Conversation, str]]) -> list[bool]:
    """Return whether each answer to a task is right, with a heartbeat before each group.

    Raises TaskError as `are_correct` does.
    """
    correct: list[bool] = []
    for start in range(0, len(graded), GRADED_AT_ONCE):
        HEARTBEAT.beat("grading")
        correct += are_correct(name, graded[start : start + GRADED_AT_ONCE])
    return correct


def accuracy(engine: Engine, task: Task, *, max_new_tokens: int, world: World) -> float:
    """Return the share of the task's examples that the model answers correctly. Collective.

    Raises DataError if the task's answers cannot be graded.
    """
    check_gradable(task)
    examples = [task[i] for i in range(world.rank, len(task), world.size)]
    answers = greedy_answers(engine, examples, max_new_tokens=max_new_tokens)
    correct = sum(grade(task.name, list(zip(examples, answers, strict=True))))
    device = engine.model.lm_head.weight.device
    # fp32 counts exactly up to 2^24 examples.
    sums = torch.tensor([correct, len(examples)], dtype=torch.float32, device=device)
    correct, total = world.sum(sums).tolist()
    return correct / max(total, 1)


def sampled_pass_at(
    engine: Engine,
    task: Task,
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    world: World,
) -> list[float]:
    """Return pass@k for k = 1 .. num_samples, the mean over the task's examples. Collective.

    An example's answers depend only on the seed and its index in the task. An example that fills
    the model's context has no right answers. Raises DataError if answers cannot be graded.
    """
    check_gradable(task)
    ids = range(world.rank, len(task), world.size)
    prompts = {i: render_for_completion(engine.tokenizer, task[i]) for i in ids}
    context = engine.model.config.sequence_len
    readable = [i for i in ids if len(prompts[i]) < context]
    groups = engine.complete(
        [prompts[i] for i in readable],
        num_samples=num_samples,
        max_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        # By the example's index, so that answers do not depend on the number of ranks.
        seeds=[seed_for(seed, i) for i in readable],
    )
    # counts[c]: examples with c right answers. Whole numbers, so that the sum is exact for any
    # number of ranks.
    counts = torch.zeros(num_samples + 1, dtype=torch.float32)
    counts[0] += len(ids) - len(readable)
    for i, group in zip(readable, groups, strict=True):
        answers = [parse_answer(engine.tokenizer, completion.ids) for completion in group]
        counts[sum(are_correct(task.name, [(task[i], answer) for answer in answers]))] += 1
    found: list[float] = world.sum(counts.to(engine.model.lm_head.weight.device)).tolist()
    return [
        sum(n * pass_at(k, correct=c, num_samples=num_samples) for c, n in enumerate(found))
        / max(len(task), 1)
        for k in range(1, num_samples + 1)
    ]


def pass_at(k: int, *, correct: int, num_samples: int) -> float:
    """Return the probability that k of `num_samples` answers, without repetition, hold a right one.

    The unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1.0 - math.comb(num_samples - correct, k) / math.comb(num_samples, k)


def check_gradable(task: Task) -> None:
    """Raise DataError unless the task's answers can be right or wrong."""
    if not is_gradable(task.name):
        raise DataError(
            f"the task '{task.name}' has no right answers to grade by",
            hint="leave it out of chat_eval and rl",
        )


def check_machine(name: str) -> None:
    """Raise StageError if this machine lacks what grading answers of the task needs."""
    grader = find_grader(name)
    if grader is None or grader.check_machine is None:
        return
    try:
        grader.check_machine()
    except TaskError as error:
        raise cannot_grade(name, error) from error


def cannot_grade(name: str, error: TaskError) -> StageError:
    """Return the error about a task that cannot be graded here, but can on another machine."""
    return StageError(
        f"answers to '{name}' cannot be graded on this machine: {error}",
        hint="`nanochat doctor` says what is missing; else run on another machine, or leave the "
        "task out of chat_eval.tasks and rl.task",
    )
