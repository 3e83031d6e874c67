"""The CORE metric (DCLM, arXiv 2406.11794): what a base model knows, without being taught to chat.

Of options the one with the lowest mean loss per token is the model's answer, of equals the first; a
continuation is right when every token of it is the likeliest. A task's score is the share of right
answers, put on a scale from guessing (0) to all right (1); CORE is the mean over tasks.

Examples are judged in blocks that are the same however many ranks there are, and so is what is
packed together: the totals do not depend on the number of ranks.
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
from nanochat_core.evaluate.core_questions import Question, make_question
from nanochat_core.evaluate.core_tasks import OPTIONS, CoreSuite, CoreTask
from nanochat_core.evaluate.intervals import Interval, centred, mean_of, share_of
from nanochat_core.model.gpt import GPT
from nanochat_core.model.trees import PackedTree, packs_of, tokens_of_pack
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEART
from nanochat_core.tokenizer.bpe import Tokenizer

BLOCK = 128  # examples that a rank takes at a time
HEAD_ROWS = 1024  # logits of so many rows at a time

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """What a model made of one task."""

    label: str
    accuracy: Interval
    centred: Interval
    answers: tuple[int, ...]  # per example: the option taken, or 1 for a right continuation, else 0
    golds: tuple[int, ...]

    @property
    def verdicts(self) -> tuple[bool, ...]:
        """Per example, whether the answer is right."""
        return tuple(a == g for a, g in zip(self.answers, self.golds, strict=True))


@dataclass(frozen=True, kw_only=True)
class CoreScore:
    """The metric and its parts."""

    core: Interval | None  # None: a task failed, and without it, it would be another measure
    tasks: tuple[TaskScore, ...]
    failed: Mapping[str, str]  # label -> why the task could not be judged


def core_metric(
    model: GPT,
    tokenizer: Tokenizer,
    suite: CoreSuite,
    *,
    world: World,
    tell: Callable[[int], None] = lambda done: None,
) -> CoreScore:
    """Judge `model`, in evaluation mode. All ranks share the work and return the same.

    `tell` is given the number of examples that are done, or about so many with several ranks.
    A task with an example of which nothing can be scored has failed.
    """
    sizes = [len(task.items) for task in suite.tasks]
    firsts = np.cumsum([0, *sizes])
    answers = torch.zeros(int(firsts[-1]), dtype=torch.int64)  # of other ranks stay 0
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
        found = answer(model, questions, greedy=suite.tasks[number].kind not in OPTIONS)
        start = int(firsts[number]) + places.start
        answers[start : start + len(places)] = torch.tensor(found)
        done += len(places) * world.size
        tell(min(done, len(answers)))
    device = model.lm_head.weight.device
    everyone = world.sum(answers.to(device)).tolist()
    reasons = {**suite.failed, **_first_reasons(world.gather(failed))}
    scores = tuple(
        score_task(task, everyone[first : first + size])
        for task, first, size in zip(suite.tasks, firsts, sizes, strict=False)
        if task.label not in reasons
    )
    core = None if reasons else mean_of([score.centred for score in scores])
    return CoreScore(core=core, tasks=scores, failed=reasons)


def _first_reasons(ranks: Sequence[Mapping[str, tuple[int, str]]]) -> dict[str, str]:
    """Why tasks failed, by the block that comes first, so the same however many ranks there are."""
    labels = sorted({label for rank in ranks for label in rank})
    return {label: min(rank[label] for rank in ranks if label in rank)[1] for label in labels}


def prepared(prepare: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """What `prepare` makes of each, the next one on another thread while this one is used: a GPU
    would else wait for text to become tokens."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = deque(thread.submit(prepare, item) for item in items[:2])
        for following in range(2, 2 + len(items)):
            yield waiting.popleft().result()
            waiting.extend(thread.submit(prepare, item) for item in items[following:][:1])


def score_task(task: CoreTask, answers: Sequence[int]) -> TaskScore:
    """The score of a task of which these are the answers."""
    golds = tuple(item["gold"] if task.kind in OPTIONS else 1 for item in task.items)
    correct = sum(a == gold for a, gold in zip(answers, golds, strict=True))
    accuracy = share_of(correct, len(golds))
    return TaskScore(
        label=task.label,
        accuracy=accuracy,
        centred=centred(accuracy, task.baseline),
        answers=tuple(answers),
        golds=golds,
    )


@torch.no_grad()
def answer(model: GPT, questions: Sequence[Question], *, greedy: bool) -> list[int]:
    """The option that the model takes of each question; with `greedy` 1 where it would say every
    target itself, else 0."""
    device = model.lm_head.weight.device
    judge = _judge_greedy if greedy else _judge_options
    answers: list[int] = []
    waiting: tuple[Sequence[Question], Tensor] | None = None
    for part in packs_of((q.tree.num_tokens for q in questions), tokens_of_pack(device)):
        HEART.beat("evaluating")
        some = questions[part.start : part.stop]
        pack = PackedTree([q.tree for q in some], device)
        targets = torch.tensor([t for q in some for t in q.targets], device=device)
        values = torch.zeros(0)  # of options that are all alike nothing is scored
        if len(targets):
            hidden = pack.read(model)
            values = (
                _hits(model, hidden, targets) if greedy else model.token_losses_at(hidden, targets)
            )
        if waiting is not None:  # a GPU works on this pack while the one before it is read
            answers += judge(*waiting)
        waiting = some, values
    return answers + judge(*waiting) if waiting is not None else answers


def _hits(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """Whether each target is the likeliest token, (R,) bool."""
    rows = zip(hidden.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
    return torch.cat([model.logits_at(some).argmax(dim=-1) == right for some, right in rows])


def _judge_greedy(questions: Sequence[Question], hits: Tensor) -> list[int]:
    parts = np.split(hits.cpu().numpy(), _borders(len(q.targets) for q in questions))
    return [int(part.all()) for part in parts]


def _judge_options(questions: Sequence[Question], losses: Tensor) -> list[int]:
    texts = np.split(losses.cpu().numpy(), _borders(n for q in questions for n in q.lengths))
    means = iter([float(text.mean()) if len(text) else math.nan for text in texts])
    answers: list[int] = []
    for question in questions:
        of_texts = [next(means) for _ in question.lengths]
        answers.append(_lowest([of_texts[i] for i in question.texts]))
    return answers


def _lowest(means: Sequence[float]) -> int:
    """The first of the lowest. An option of which nothing is scored, whose mean is not a number,
    is chosen where it comes first and never else, as nanochat's comparison has it."""
    return means.index(min(means))


def _borders(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    """Where one ends and the next begins."""
    return np.cumsum(list(lengths))[:-1]
