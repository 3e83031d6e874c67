"""What a person sees of the events of stages that are built."""

import io
import re
import threading
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from flows.render import events
from flows.render import terminal as display
from flows.render.events import describe, describe_values
from flows.render.terminal import Display
from flows.render.text import duration

BUILDING = {"kind": "building", "fingerprint": "f", "processes": 1}
START = {"kind": "start", "step": 0, "total": 100, "unit": "step", "resumed": False}


def step(number: int, **values: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "total": 100, "values": values}


def show(*events: tuple[str, dict[str, Any]], terminal: bool = False) -> str:
    """What is printed for these events."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with Display(console, stages=("rows", "pretrain")) as shown:
        for stage, event in events:
            shown.watch(stage, event)
    return out.getvalue()


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"kind": "cached", "uri": "file:///x"}, "cached"),
        (BUILDING, "started"),
        ({"kind": "building", "fingerprint": "f", "processes": 8}, "started, 8 processes"),
        (START, None),
        ({**START, "step": 40, "resumed": True}, "resumed at step 40/100"),
        ({"kind": "eval", "step": 50, "values": {"val_bpb": 1.5}}, "step 50: val_bpb 1.5"),
        ({"kind": "message", "text": "hello"}, "hello"),
        (
            {"kind": "finished", "uri": "", "seconds": 83.4, "metrics": {"a": 1.23456, "b": "x"}},
            "finished in 1 min 23 s: a 1.235",
        ),
        ({"kind": "failed", "error": "no good", "log_tail": ""}, "failed: no good"),
        (step(3, loss=1.0), None),
    ],
)
def test_each_event_has_its_line(event, text):
    assert describe(event) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.043, "0.04 s"),
        (4.21, "4.2 s"),
        (9.98, "10 s"),
        (75, "1 min 15 s"),
        (3725, "1 h 2 min"),
        (172_799, "47 h 59 min"),
        (172_800, "2 days"),
        (3601, "1 h"),
        (720, "12 min"),
        (652_944_960, "20 years 8 months"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds, text):
    assert duration(seconds) == text


def test_lines_are_aligned_and_plain_where_there_is_no_terminal(transcript):
    out = io.StringIO()
    finished = {"kind": "finished", "uri": "file:///x/rows/ab/m", "seconds": 1.0, "metrics": {}}
    failed = {"kind": "failed", "error": "no good", "log_tail": "Traceback\n  x"}
    with Display(
        Console(file=out, width=200),
        stages=("rows", "pretrain"),
        offer=lambda stage, event: f"see {event['uri']}" if "uri" in event else None,
    ) as shown:
        shown.watch("shards", {"kind": "cached", "uri": "file:///x"})
        shown.watch("rows", BUILDING)
        shown.watch("rows", {"kind": "message", "text": "[red]not markup[/red]\nof one event"})
        shown.watch("rows", finished)
        shown.watch("pretrain", failed)
    transcript.check("events of three stages", out.getvalue())


def test_steps_are_lines_now_and_then_with_values_and_the_time_left(monkeypatch):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    # A busy machine needs 0.01 s for the step.
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    printed = show(("pretrain", START), ("pretrain", step(50, loss=3.14159, tokens_per_second=9e4)))

    assert printed == "pretrain  step 50/100, loss 3.142, 90,000 tokens/s, 0 s left\n"


def test_steps_in_quick_succession_print_nothing():
    steps = [("pretrain", step(number)) for number in range(50)]

    assert show(("pretrain", START), *steps) == ""


def test_a_terminal_shows_a_bar_and_takes_it_away():
    printed = show(
        ("pretrain", BUILDING),
        ("pretrain", START),
        ("pretrain", step(30, loss=2.0)),
        ("pretrain", {"kind": "finished", "uri": "", "seconds": 5.0, "metrics": {}}),
        terminal=True,
    )

    assert "finished in 5 s" in printed
    assert "\x1b[?25h" in printed[-10:]  # the cursor is given back


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    printed = show(("rows", {"kind": "warning", "text": "odd"}), terminal=True)

    assert "\x1b[33m" not in printed


def test_stages_may_speak_at_the_same_time():
    out = io.StringIO()
    names = [f"s{number}" for number in range(8)]
    with Display(Console(file=out), stages=names) as shown:

        def speak(name: str) -> None:
            shown.watch(name, START)
            for number in range(50):
                shown.watch(name, {"kind": "message", "text": f"line {number}"})
            shown.watch(name, {"kind": "finished", "uri": "", "seconds": 1.0, "metrics": {}})

        threads = [threading.Thread(target=speak, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines = out.getvalue().splitlines()
    assert len(lines) == 8 * 51
    assert [line for line in lines if line.startswith("s3")][7] == "s3  line 7"


def test_a_number_with_its_interval_is_one_number():
    values = {"core": 0.21, "core_low": 0.2, "core_high": 0.223, "price_low": 2.0, "steps": 7}
    assert describe_values(values) == "core 0.21 (0.2 to 0.223), price_low 2, steps 7"
    assert describe_values({"core": 0.21, "core_low": 0.2}) == "core 0.21"


def test_the_time_left_of_the_whole_run_counts_stages_that_have_not_ended(monkeypatch):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    expected = {"rows": 3600.0, "pretrain": 7220.0}
    with Display(Console(file=out), stages=expected, expected=expected) as shown:
        assert shown.left == "about 3 h left"
        shown.watch("rows", BUILDING)
        shown.watch("rows", {"kind": "finished", "uri": "", "seconds": 4.0, "metrics": {}})
        assert shown.left == "about 2 h left"
        shown.watch("pretrain", START)
        shown.watch("pretrain", step(100))  # from here on its own pace counts
        assert out.getvalue().endswith("step 100/100, 0 s left; run about 0 s left\n")
        shown.watch("pretrain", {"kind": "finished", "uri": "", "seconds": 9.0, "metrics": {}})
        assert shown.left == ""


class Clock:
    """A monotonic clock that a test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the display and its loops; each step is due as a line."""
    clock = Clock()
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(display, "time", clock)
    monkeypatch.setattr(events, "time", clock)
    return clock


def test_a_stage_of_unknown_time_never_counts_as_no_time(clock):
    out = io.StringIO()
    expected = {"rows": 60.0, "midtrain": None, "sft": None}
    with Display(Console(file=out, width=200), stages=expected, expected=expected) as shown:
        assert shown.left == "at least 1 min left"
        shown.watch("rows", {"kind": "finished", "uri": "", "seconds": 4.0, "metrics": {}})
        assert shown.left == "time left not known"
        shown.watch("midtrain", BUILDING)
        shown.watch("midtrain", START)
        clock.now += 60
        shown.watch("midtrain", step(20))  # from here on its pace is known
        line = out.getvalue().splitlines()[-1]
        assert line.endswith("4 min left; run at least 4 min left")
        shown.watch("sft", BUILDING)
        shown.watch("sft", START)
        clock.now += 30
        shown.watch("sft", step(50))
        line = out.getvalue().splitlines()[-1]
        assert line.endswith("30 s left; run about 6 min 30 s left")


def test_a_stage_that_takes_longer_than_expected_makes_the_sum_a_lower_bound(clock):
    expected = {"rows": 10.0, "pretrain": 100.0}
    with Display(Console(file=io.StringIO()), stages=expected, expected=expected) as shown:
        shown.watch("rows", BUILDING)
        clock.now += 9
        assert shown.left == "about 1 min 41 s left"
        clock.now += 9
        assert shown.left == "at least 1 min 40 s left"
        shown.watch("pretrain", BUILDING)
        clock.now += 101
        assert shown.left == "time left not known"


def test_a_stage_that_was_not_going_to_be_built_counts_once_it_is(clock):
    out = io.StringIO()
    with Display(Console(file=out, width=200), stages=["rows"], expected={"sft": 5.0}) as shown:
        shown.watch("rows", BUILDING)
        assert shown.left == "at least 5 s left"
        shown.watch("rows", START)
        clock.now += 100
        shown.watch("rows", step(25))
        assert out.getvalue().splitlines()[-1].endswith("5 min left; run about 5 min 5 s left")


@pytest.mark.parametrize("seed", range(20))
def test_the_run_has_never_less_time_left_than_a_stage_of_it(clock, seed):
    random = Random(seed)
    names = [f"s{number}" for number in range(6)]
    expected = {name: random.choice([None, 0.5, 30.0, 500.0]) for name in names[1:]}
    out = io.StringIO()
    with Display(Console(file=out, width=200), stages=names, expected=expected) as shown:
        steps = dict.fromkeys(names, 0)
        for name in names[:4]:
            shown.watch(name, BUILDING)
            shown.watch(name, START)
        for _ in range(50):
            clock.now += random.expovariate(0.1)
            name = random.choice(names[:4])
            steps[name] = min(100, steps[name] + random.randint(1, 9))
            shown.watch(name, step(steps[name]))
    lines = [line for line in out.getvalue().splitlines() if " step " in line]
    assert lines
    for line in lines:
        stage, run = line.split("; run ")
        assert run.startswith(("about ", "at least "))
        assert seconds_in(run.removesuffix(" left")) >= seconds_in(stage.removesuffix(" left"))


def seconds_in(text: str) -> float:
    """The duration at the end of a text."""
    units = {"s": 1, "min": 60, "h": 3600, "days": 86400}
    found = re.search(r"(?:[\d.]+ (?:s|min|h|days) ?)+$", text)
    words = found[0].split()
    return sum(float(n) * units[unit] for n, unit in zip(words[::2], words[1::2], strict=True))
