"""Scores as the report card shows them: each with its interval, and with what others scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.render.text import percent

CHAT_MODELS = {"midtrain": "mid", "sft": "SFT", "rl": "RL"}  # stage -> column of the score table
GPT2_CORE = 0.2565  # of OpenAI's GPT-2 (1.6 B parameters), as nanochat's leaderboard has it


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
        """The interval in words: "15.9 to 27.2 %"."""
        return f"{100 * self.low:.1f} to {percent(self.high)}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A score that is no share, with its 95 % interval where it is told."""

    value: float
    low: float | None
    high: float | None

    def text(self, decimals: int) -> str:
        """The number, and the interval in brackets."""
        shown = f"{self.value:.{decimals}f}"
        if self.low is None or self.high is None:
            return shown
        return f"{shown} ({self.low:.{decimals}f} to {self.high:.{decimals}f})"


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
    centred: float  # the same on a scale from guessing, 0, to all right, 1


def chat_rows(scores: Mapping[str, dict[str, Any]]) -> tuple[ScoreRow, ...]:
    """A row for each task that any of the chat models was asked; `scores`: scores.json by stage."""
    tasks = sorted({task for of_model in scores.values() for task in of_model["tasks"]})
    return tuple(
        ScoreRow(
            task=task, scores=tuple(_score(scores[stage]["tasks"], task) for stage in CHAT_MODELS)
        )
        for task in tasks
    )


def core_rows(scores: Mapping[str, Any]) -> tuple[CoreRow, ...]:
    """The tasks of CORE in the bundle's order; none where CORE was not asked."""
    tasks: dict[str, dict[str, Any]] = scores.get("tasks", {})
    found = ((task, _score(tasks, task)) for task in tasks)
    return tuple(
        CoreRow(task=task, share=share, centred=tasks[task]["centred"])
        for task, share in found
        if share is not None
    )


def base_scores(scores: Mapping[str, Any]) -> tuple[tuple[str, Measured], ...]:
    """Every single number of base_eval's scores.json: name and value."""
    found = ((name, measured(scores, name)) for name in scores)
    return tuple((name, score) for name, score in found if score is not None)


def measured(scores: Mapping[str, Any], name: str) -> Measured | None:
    """A number of a scores.json; None where it has none."""
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
