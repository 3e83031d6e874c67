"""Scores on the report card, each with its 95 % interval, and what each stage changed in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from flows.render.paired import delta_of, pair
from flows.render.score import Delta, Score
from flows.render.text import percent
from flows.stages import CHAT_MODELS

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


def chat_scores(scores: Mapping[str, dict[str, Any]]) -> dict[str, tuple[TaskScore | None, ...]]:
    """Return the scores of each task by chat model, in the order of CHAT_MODELS.

    `scores` is scores.json by stage. None: not asked, or failed, which leaves a task out.
    """
    found = [task_scores(scores[stage.name]) for stage in CHAT_MODELS]
    tasks = sorted({task for of_model in found for task in of_model})
    return {task: tuple(of_model.get(task) for of_model in found) for task in tasks}


def chat_changes(
    scores: Mapping[str, dict[str, Any]], files: Sequence[Path]
) -> dict[str, tuple[Delta | None, ...]]:
    """Return by task and for "chatcore" the difference of each chat model from the one before.

    `files` are the directories of their evaluations, in the order of CHAT_MODELS. None: the first
    model, or one of the two was not asked. Raises ArtifactError.
    """
    numbers = [_numbers(scores[stage.name]) for stage in CHAT_MODELS]
    steps = list(zip(pairwise(numbers), map(pair, files, files[1:]), strict=True))
    return {
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
    }


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
