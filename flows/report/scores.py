"""Scores on the report card, each with its 95 % interval, and what each stage changed in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from flows.render.paired import delta_of, pair
from flows.render.score import Delta, Score
from flows.render.text import listed, percent
from flows.report.inputs import Artifact
from flows.stages import CHAT_MODELS, Stage

_MAX_LOSSES = 3  # that a line names
GPT2_CORE = 0.2565  # OpenAI's GPT-2 (1.6 B parameters), from nanochat's leaderboard


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Share of one task's questions answered correctly, with its 95 % interval."""

    accuracy: float
    low: float
    high: float
    correct: int
    total: int
    centred: float | None = None  # the share rescaled: guessing is 0, all right is 1; of CORE

    @property
    def interval(self) -> str:
        """The interval as text: "15.9 to 27.2 %"."""
        return f"{100 * self.low:.1f} to {percent(self.high)}"


@dataclass(frozen=True, kw_only=True)
class ChatScores:
    """What the chat models of a run score, in the order of their training."""

    models: tuple[Stage, ...]  # those that were evaluated
    tasks: Mapping[str, tuple[TaskScore | None, ...]]  # by task; None: not asked, or failed
    chatcore: tuple[Score | None, ...]  # None: a task could not be evaluated
    # By task, and of "chatcore": the difference from the model before; None where there is none.
    changes: Mapping[str, tuple[Delta | None, ...]]

    def chatcore_change(self, place: int) -> str:
        """Return by how much ChatCORE differs from the model before; "" if that is not known."""
        change = self.changes["chatcore"][place] if "chatcore" in self.changes else None
        return change.number(decimals=3) if change else ""

    @property
    def course(self) -> str:
        """ChatCORE by model, in a line."""
        shown = (
            f"{f'{score.value:.3f}' if score else 'not known'} after {model.label}"
            for model, score in zip(self.models, self.chatcore, strict=True)
        )
        return f"ChatCORE: {', '.join(shown)}"

    @property
    def losses(self) -> str:
        """The tasks that a stage made worse, in a line; the largest losses first."""
        found: list[tuple[float, str]] = []
        for task, scores in self.tasks.items():
            steps = zip(self.models[1:], pairwise(scores), self.changes[task][1:], strict=True)
            for model, (before, after), change in steps:
                if before and after and change and is_loss(change):
                    shares = f"{percent(before.accuracy)} -> {percent(after.accuracy)}"
                    found.append((change.value, f"{task} {shares} after {model.label}"))
        if not found:
            return "nothing worse: no task scores clearly lower than one stage before"
        return f"worse: {listed([text for _, text in sorted(found)], _MAX_LOSSES)}"


def is_loss(change: Delta | None) -> bool:
    """Return whether a score fell beyond chance: the 95 % interval leaves out 0."""
    return change is not None and change.is_clear and change.value < 0


def chat_scores(evaluations: Mapping[str, Artifact]) -> ChatScores:
    """Return the scores of chat models by their evaluations. Raises ArtifactError."""
    models = tuple(model for model in CHAT_MODELS if model.name in evaluations)
    artifacts = [evaluations[model.name] for model in models]
    trees = [artifact.read_json("scores.json") for artifact in artifacts]
    files = [artifact.files for artifact in artifacts]
    tasks = [task_scores(tree) for tree in trees]
    numbers = [_numbers(tree) for tree in trees]
    steps = list(zip(pairwise(numbers), map(pair, files, files[1:]), strict=True))
    return ChatScores(
        models=models,
        tasks={
            name: tuple(of_model.get(name) for of_model in tasks)
            for name in sorted({name for of_model in tasks for name in of_model})
        },
        chatcore=tuple(measured(tree, "chatcore") for tree in trees),
        changes={
            name: (
                None,
                *(
                    delta_of(old[name], new[name], pairs.differences.get(name))
                    if name in old and name in new
                    else None
                    for (old, new), pairs in steps
                ),
            )
            for name in sorted({name for of_model in numbers for name in of_model})
        },
    )


def summary(metrics: Mapping[str, Any], chat: ChatScores) -> Iterator[str]:
    """Yield a run's main numbers as "label: text": bits per byte, ChatCORE, and what got worse.

    `metrics` are those of pretraining. A line is left out where its numbers are missing.
    """
    first, last = metrics.get("val_bpb_first"), metrics.get("val_bpb")
    if first and last:
        yield f"bits per byte: {first:.3f} -> {last:.3f} ({100 * (last / first - 1):+.1f} %)"
    if chat.models:
        yield chat.course
    if len(chat.models) > 1:
        yield chat.losses


def _numbers(scores: Mapping[str, Any]) -> dict[str, Score]:
    found = {
        task: Score(value=score.accuracy, low=score.low, high=score.high)
        for task, score in task_scores(scores).items()
    }
    chatcore = measured(scores, "chatcore")
    return found | ({"chatcore": chatcore} if chatcore else {})


def task_scores(scores: Mapping[str, Any]) -> dict[str, TaskScore]:
    """Return the tasks of a scores.json in its order, then its kinds of turns; may be empty."""
    names = [field.name for field in fields(TaskScore)]
    return {
        task: TaskScore(**{name: found[name] for name in names if name in found})
        for task, found in {**scores.get("tasks", {}), **scores.get("turns", {})}.items()
    }


def measured(scores: Mapping[str, Any], name: str) -> Score | None:
    """Return a number of a scores.json, or None if it has none of this name."""
    # Not int: `format` is one, and no score.
    value = scores.get(name)
    if not isinstance(value, float):
        return None
    low, high = scores.get("intervals", {}).get(name, (None, None))
    return Score(value=value, low=low, high=high)
