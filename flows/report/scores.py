"""Scores on the report card, each with its 95 % interval."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.render.text import percent, with_interval
from flows.stages import CHAT_MODELS

GPT2_CORE = 0.2565  # OpenAI's GPT-2 (1.6 B parameters), from nanochat's leaderboard


@dataclass(frozen=True, kw_only=True)
class CardScore:
    """Share of one task's questions answered correctly, with its 95 % interval."""

    accuracy: float
    low: float
    high: float
    correct: int
    total: int

    @property
    def interval(self) -> str:
        """The interval as text: "15.9 to 27.2 %"."""
        return f"{100 * self.low:.1f} to {percent(self.high)}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A score that is not a share, with its 95 % interval; None where there is none."""

    value: float
    low: float | None
    high: float | None

    def text(self, decimals: int) -> str:
        """Return the number, and the interval in brackets."""
        return with_interval(self.value, self.low, self.high, decimals=decimals)


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One task: its score per chat model, in the order of CHAT_MODELS."""

    task: str
    scores: tuple[CardScore | None, ...]


@dataclass(frozen=True, kw_only=True)
class CoreRow:
    """One task of CORE."""

    task: str
    share: CardScore  # of right answers
    centred: float  # the same share rescaled: guessing is 0, all right is 1


def chat_rows(scores: Mapping[str, dict[str, Any]]) -> tuple[ScoreRow, ...]:
    """Return a row for each task asked of any chat model; `scores`: scores.json by stage."""
    # An evaluation leaves out tasks that failed, so the union of all is taken.
    tasks = sorted({task for of_model in scores.values() for task in of_model["tasks"]})
    return tuple(
        ScoreRow(
            task=task,
            scores=tuple(_score(scores[stage.name]["tasks"], task) for stage in CHAT_MODELS),
        )
        for task in tasks
    )


def core_rows(scores: Mapping[str, Any]) -> tuple[CoreRow, ...]:
    """Return the tasks of CORE in the bundle's order; empty if CORE was not measured."""
    tasks: dict[str, dict[str, Any]] = scores.get("tasks", {})
    found = ((task, _score(tasks, task)) for task in tasks)
    return tuple(
        CoreRow(task=task, share=share, centred=tasks[task]["centred"])
        for task, share in found
        if share is not None
    )


def base_scores(scores: Mapping[str, Any]) -> tuple[tuple[str, Measured], ...]:
    """Return every top-level number of base_eval's scores.json: name and value."""
    found = ((name, measured(scores, name)) for name in scores)
    return tuple((name, score) for name, score in found if score is not None)


def measured(scores: Mapping[str, Any], name: str) -> Measured | None:
    """Return a number of a scores.json, or None if it has none of this name."""
    # Not int: `format` is one, and no score.
    value = scores.get(name)
    if not isinstance(value, float):
        return None
    low, high = scores.get("intervals", {}).get(name, (None, None))
    return Measured(value=value, low=low, high=high)


def _score(tasks: Mapping[str, dict[str, Any]], task: str) -> CardScore | None:
    if task not in tasks:
        return None
    found = tasks[task]
    return CardScore(
        **{name: found[name] for name in ("accuracy", "low", "high", "correct", "total")}
    )
