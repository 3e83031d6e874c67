"""The CORE metric (DCLM, arXiv 2406.11794): a base model's knowledge, measured without chat.

The model's answer is the option with the lowest mean loss per token, the first of equals; a
continuation is right if each of its tokens is the likeliest. A task's score is the share of right
answers on a scale from guessing (0) to all right (1); CORE is the mean over tasks.

Examples are evaluated in blocks that do not depend on the number of ranks, nor does the packing
inside a block, so the scores do not depend on it either.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanochat_core.errors import DataError
from nanochat_core.evaluate.core_questions import Encoder, Question, make_question
from nanochat_core.evaluate.core_tasks import OPTIONS, CoreSuite, CoreTask
from nanochat_core.evaluate.intervals import Interval, centred, mean_of, share_of
from nanochat_core.model.gpt import GPT
from nanochat_core.model.trees import PackedTree, packs_of, tokens_of_pack
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.tokenizer.bpe import Tokenizer

BLOCK = 128  # examples per unit of work
HEAD_ROWS = 1024  # rows whose logits are computed at a time, to bound memory

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A model's answers to one task, and their score."""

    label: str
    accuracy: Interval
    centred: Interval
    baseline: float  # the accuracy of guessing
    answers: tuple[int, ...]  # per example: the option taken, or 1 for a right continuation, else 0
    golds: tuple[int, ...]

    @property
    def verdicts(self) -> tuple[bool, ...]:
        """Per example, whether the answer is right."""
        return tuple(a == g for a, g in zip(self.answers, self.golds, strict=True))


@dataclass(frozen=True, kw_only=True)
class CoreScore:
    """The metric and its parts."""

    core: Interval | None  # None if a task failed: a mean without it would be another metric
    tasks: tuple[TaskScore, ...]
    failed: Mapping[str, str]  # label -> why the task could not be evaluated


def core_metric(
    model: GPT,
    tokenizer: Tokenizer,
    suite: CoreSuite,
    *,
    world: World,
    log: Callable[[int], None] = lambda done: None,
) -> CoreScore:
    """Evaluate `model`, in evaluation mode: see `core_of`."""

    def ask(questions: Sequence[Question], greedy: bool) -> list[int]:
        return answer(model, questions, greedy=greedy)

    device = model.lm_head.weight.device
    return core_of(ask, tokenizer, suite, device=device, world=world, log=log)


def core_of(
    ask: Callable[[Sequence[Question], bool], list[int]],
    tokenizer: Encoder,
    suite: CoreSuite,
    *,
    device: torch.device,
    world: World,
    log: Callable[[int], None],
) -> CoreScore:
    """Evaluate a model on `device`. All ranks share the work and return the same.

    `ask` returns the answers to some questions, as `answer`, whose `greedy` is its second argument.
    `log` gets the number of examples done, an estimate with several ranks. A task fails
    if one of its examples has no tokens to score.
    """
    sizes = [len(task.items) for task in suite.tasks]
    firsts = np.cumsum([0, *sizes])
    # Those of other ranks stay 0, so the sum over ranks below is a gather.
    answers = torch.zeros(int(firsts[-1]), dtype=torch.int64)
    blocks = [
        (number, range(begin, min(begin + BLOCK, size)))
        for number, size in enumerate(sizes)
        for begin in range(0, size, BLOCK)
    ]
    own = blocks[world.rank :: world.size]

    def prepare(block: tuple[int, range]) -> list[Question] | DataError:
        number, places = block
        try:
            return [make_question(suite.tasks[number], place, tokenizer) for place in places]
        except DataError as error:
            return error

    done = 0
    failed: dict[str, tuple[int, str]] = {}  # label -> the first block that failed, why
    for (number, places), questions in zip(own, prepared(prepare, own), strict=True):
        if isinstance(questions, DataError):
            failed.setdefault(suite.tasks[number].label, (places.start, str(questions)))
            continue
        try:
            found = ask(questions, suite.tasks[number].kind not in OPTIONS)
        except DataError as error:
            failed.setdefault(suite.tasks[number].label, (places.start, str(error)))
            continue
        start = int(firsts[number]) + places.start
        answers[start : start + len(places)] = torch.tensor(found)
        done += len(places) * world.size
        log(min(done, len(answers)))
    # Over the model's device, as NCCL sums no CPU tensors.
    everyone = world.sum(answers.to(device)).tolist()
    reasons = {**suite.failed, **_first_reasons(world.gather(failed))}
    scores = tuple(
        score_task(task, everyone[first : first + size])
        for task, first, size in zip(suite.tasks, firsts, sizes, strict=False)
        if task.label not in reasons
    )
    # The mean weighs every task the same, whatever its number of examples, as in DCLM.
    core = None if reasons else mean_of([score.centred for score in scores])
    return CoreScore(core=core, tasks=scores, failed=reasons)


def _first_reasons(ranks: Sequence[Mapping[str, tuple[int, str]]]) -> dict[str, str]:
    """Return why each task failed: its first block's reason, for any number of ranks the same."""
    labels = sorted({label for rank in ranks for label in rank})
    return {label: min(rank[label] for rank in ranks if label in rank)[1] for label in labels}


def prepared(prepare: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield `prepare` of each item; the next ones are prepared on another thread meanwhile."""
    # Otherwise a GPU would be idle while text is tokenised.
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = deque(thread.submit(prepare, item) for item in items[:2])
        for following in range(2, 2 + len(items)):
            yield waiting.popleft().result()
            waiting.extend(thread.submit(prepare, item) for item in items[following:][:1])


def score_task(task: CoreTask, answers: Sequence[int]) -> TaskScore:
    """Return the score of these answers to a task."""
    golds = tuple(item["gold"] if task.kind in OPTIONS else 1 for item in task.items)
    correct = sum(a == gold for a, gold in zip(answers, golds, strict=True))
    accuracy = share_of(correct, len(golds))
    return TaskScore(
        label=task.label,
        accuracy=accuracy,
        centred=centred(accuracy, task.baseline),
        baseline=task.baseline,
        answers=tuple(answers),
        golds=golds,
    )


@torch.no_grad()
def answer(model: GPT, questions: Sequence[Question], *, greedy: bool) -> list[int]:
    """Return the option that the model chooses for each question; with `greedy` 1 if every target
    is its likeliest token, else 0."""
    device = model.lm_head.weight.device
    answers: list[int] = []
    waiting: tuple[Sequence[Question], Tensor] | None = None
    for part in packs_of((q.tree.num_tokens for q in questions), tokens_of_pack(device)):
        HEARTBEAT.beat("evaluating")
        some = questions[part.start : part.stop]
        pack = PackedTree([q.tree for q in some], device)
        targets = torch.tensor([t for q in some for t in q.targets], device=device)
        values = torch.zeros(0)  # if all options are equal, there is nothing to score
        if len(targets):
            hidden = pack.read(model)
            values = (
                _hits(model, hidden, targets) if greedy else model.token_losses_at(hidden, targets)
            )
        # The copy to the host waits for the GPU: read the previous pack while this one runs.
        if waiting is not None:
            answers += answers_from(*waiting, greedy=greedy)
        waiting = some, values
    return answers + answers_from(*waiting, greedy=greedy) if waiting is not None else answers


def answers_from(questions: Sequence[Question], values: Tensor, *, greedy: bool) -> list[int]:
    """Return the answer to each question from a value for each of all targets, (R,).

    With `greedy` it is whether the target is the likeliest token, else its loss.
    """
    return (_greedy_answers if greedy else _chosen_options)(questions, values)


def _hits(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return whether each target is the likeliest token, (R,) bool."""
    # The uncapped logits suffice: the soft cap is monotonic, so the likeliest token is the same.
    rows = zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
    return torch.cat([model.logits_at(some).argmax(dim=-1) == right for some, right in rows])


def _greedy_answers(questions: Sequence[Question], hits: Tensor) -> list[int]:
    # One text per question: right if every target was the likeliest token.
    parts = np.split(hits.cpu().numpy(), _borders(len(q.targets) for q in questions))
    return [int(part.all()) for part in parts]


def _chosen_options(questions: Sequence[Question], losses: Tensor) -> list[int]:
    texts = np.split(losses.cpu().numpy(), _borders(n for q in questions for n in q.lengths))
    means = iter([float(text.mean()) if len(text) else math.nan for text in texts])
    answers: list[int] = []
    for question in questions:
        # Equal options share a text, so they have exactly equal means.
        of_texts = [next(means) for _ in question.lengths]
        answers.append(_lowest([of_texts[i] for i in question.texts]))
    return answers


def _lowest(means: Sequence[float]) -> int:
    """Return the index of the lowest mean, the first of equals."""
    # The mean of an option without scored tokens is NaN. `min` keeps a NaN that comes first and
    # ignores later ones, which is also nanochat's behaviour.
    return means.index(min(means))


def _borders(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    """Return the indices at which `np.split` separates pieces of these lengths."""
    return np.cumsum(list(lengths))[:-1]
