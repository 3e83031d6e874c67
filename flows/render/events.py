"""The events of a stage's build as text: one line each, for a terminal, a log or a page."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flows.render.paired import scores_in
from flows.render.text import duration, number, percent

_SHOWN_VALUES = 4


def describe(event: Mapping[str, Any]) -> str | None:
    """Return one plain line for an event, or None for events that only move a bar."""
    match event["kind"]:
        case "cached":
            return "cached"
        case "building":
            several = event["processes"] > 1
            return f"started, {event['processes']} processes" if several else "started"
        case "start" if event["resumed"]:
            return f"resumed at {event['unit']} {event['step']}/{event['total']}"
        case "eval":
            return f"step {event['step']}: {describe_values(event['values'])}"
        case "finished":
            values = describe_values(event["metrics"])
            return f"finished in {duration(event['seconds'])}{values and ': '}{values}"
        case "interrupted":
            return "interrupted; the same command resumes from here"
        case "failed":
            return f"failed: {event['error']}"
        case "warning":
            return f"warning: {event['text']}"
        case "message" | "waiting":
            return event["text"]
        case _:
            return None


def describe_values(values: Mapping[str, Any]) -> str:
    """Return the first 4 numbers of a group: "loss 3.21, core 0.21 (0.2 to 0.22)"."""
    shown = [
        _value(name, score.value) + (f" ({score.interval})" if score.interval else "")
        for name, score in scores_in(values).items()
    ]
    return ", ".join(shown[:_SHOWN_VALUES])


def _value(name: str, value: float) -> str:
    match name:
        case "tokens_per_second":
            return f"{value:,.0f} tokens/s"
        case "mfu":
            return f"{percent(value)} MFU"
        case "seconds":
            return f"{duration(value)} a step"
        case _:
            return f"{name} {number(value)}"


@dataclass(kw_only=True)
class Loop:
    """The loop that a stage is executing, from its `start` event on."""

    unit: str
    first: int  # step at which this execution began
    step: int
    total: int
    values: str = ""  # the newest ones, as text
    began: float = field(default_factory=lambda: time.monotonic())

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> "Loop":
        """Return the loop that a `start` event begins."""
        step = event["step"]
        return cls(unit=event["unit"], first=step, step=step, total=event["total"])

    def move(self, event: Mapping[str, Any]) -> None:
        """Take over step and values of a `step` event."""
        self.step, self.total = event["step"], event["total"]
        self.values = describe_values(event["values"])

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left; None before the first step of this execution."""
        # From this execution's steps alone: those before a resume ran at another time and speed.
        done = self.step - self.first
        if done <= 0:
            return None
        spent = time.monotonic() - self.began
        return (self.total - self.step) * spent / done

    @property
    def percent(self) -> float:
        """The share that is done, 0 to 100."""
        return 100.0 * self.step / max(self.total, 1)

    def __str__(self) -> str:
        """Return the progress without the time left: "step 120/320, loss 3.21, 4,887 tokens/s"."""
        return ", ".join(filter(None, (f"{self.unit} {self.step}/{self.total}", self.values)))

    @property
    def line(self) -> str:
        """The progress with the time left, from the first step of this execution on."""
        seconds = self.seconds_left
        return str(self) if seconds is None else f"{self}, {duration(seconds)} left"
