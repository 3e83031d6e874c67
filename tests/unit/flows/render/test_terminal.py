"""What a person sees of the events of stages that are built."""

import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from flows.render import events
from flows.render import terminal as display
from flows.render.events import describe_values
from flows.render.terminal import Display

BUILDING = {"kind": "building", "fingerprint": "f", "processes": 1}
START = {"kind": "start", "step": 0, "total": 100, "unit": "step", "resumed": False}
FINISHED = {"kind": "finished", "uri": "", "seconds": 5.0, "metrics": {}}


def step(number: int, **values: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "total": 100, "values": values}


class Clock:
    """A monotonic clock that a test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the display and its loops."""
    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    monkeypatch.setattr(events, "time", clock)
    return clock


def test_a_number_with_its_interval_is_one_number():
    values = {"core": 0.21, "core_low": 0.2, "core_high": 0.223, "price_low": 2.0, "steps": 7}
    assert describe_values(values) == "core 0.21 (0.2 to 0.223), price_low 2, steps 7"
    assert describe_values({"core": 0.21, "core_low": 0.2}) == "core 0.21"


def test_lines_are_aligned_and_plain_where_there_is_no_terminal(transcript):
    out = io.StringIO()
    finished = {"kind": "finished", "uri": "file:///x/rows/ab/m", "seconds": 83.4}
    failed = {"kind": "failed", "error": "no good", "log_tail": "Traceback\n  x"}
    with Display(
        Console(file=out, width=200),
        stages=("rows", "pretrain"),
        offer=lambda stage, event: f"see {event['uri']}" if "uri" in event else None,
    ) as shown:
        shown.watch("shards", {"kind": "cached", "uri": "file:///x"})
        shown.watch("rows", BUILDING)
        shown.watch("rows", {"kind": "message", "text": "[red]not markup[/red]\nof one event"})
        shown.watch("rows", finished | {"metrics": {"a": 1.23456, "b": "x"}})
        shown.watch("pretrain", BUILDING | {"processes": 8})
        shown.watch("pretrain", START)
        shown.watch("pretrain", START | {"step": 40, "resumed": True})
        shown.watch("pretrain", {"kind": "eval", "step": 50, "values": {"val_bpb": 1.5}})
        shown.watch("pretrain", step(51, loss=1.0))
        shown.watch("pretrain", {"kind": "warning", "text": "odd"})
        shown.watch("pretrain", {"kind": "interrupted"})
        shown.watch("pretrain", failed)
    transcript.check("events of three stages", out.getvalue())


def test_a_terminal_shows_a_bar_and_takes_it_away():
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=True, width=200), stages=["pretrain"]) as shown:
        for event in (BUILDING, START, step(30, loss=2.0), FINISHED):
            shown.watch("pretrain", event)
    assert "finished in 5 s" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue()[-10:]  # the cursor is given back


def test_the_time_left_counts_stages_that_have_not_ended(clock, transcript):
    """Check the lines, and after each event the time left of the run, where seconds pass too."""

    def shows(expected: Mapping[str, float | None], *story: tuple[str, dict[str, Any]] | float):
        out = io.StringIO()
        names = ("rows", "midtrain", "sft")
        with Display(Console(file=out, width=200), stages=names, expected=expected) as shown:
            for each in (0.0, *story):
                if isinstance(each, float):
                    clock.now += each
                    out.write(f"after {each:g} s: {shown.left or 'nothing left'}\n")
                else:
                    shown.watch(*each)
        transcript.check(f"stages of {expected}", out.getvalue())

    def begin(stage: str) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (stage, BUILDING), (stage, START)

    def steps(stage: str, number: int) -> tuple[tuple[str, dict[str, Any]], float]:
        return (stage, step(number, loss=3.14159, tokens_per_second=9e4)), 0.0

    half = (4.0, *steps("rows", 50), 1.0, *steps("rows", 60))
    shows({"rows": 60.0}, *begin("rows"), 1.0, *steps("rows", 1), *half)
    # The pace of a stage counts once it is known; a stage of unknown time never counts as no time.
    unknown = {"rows": 60.0, "midtrain": None, "sft": None}
    then = (*begin("midtrain"), 60.0, *steps("midtrain", 20), *begin("sft"), 30.0)
    shows(unknown, ("rows", FINISHED), 0.0, *then, *steps("sft", 50), ("midtrain", FINISHED), 0.0)
    # A stage that takes longer than expected makes the sum a lower bound.
    late = {"rows": 10.0, "sft": 100.0}
    shows(late, ("rows", BUILDING), 9.0, 9.0, ("sft", BUILDING), 101.0, ("sft", FINISHED), 0.0)
    # A stage that was not going to be built counts once it is.
    shows({"sft": 5.0}, *begin("rows"), 0.0, 100.0, *steps("rows", 25), ("rows", FINISHED), 0.0)
