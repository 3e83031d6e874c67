"""A stage request on a gang: submitted once, followed, found again, and explained when it ends."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from flows.building import gangs, stage_request
from flows.building.build import look_up
from flows.building.gangs import build_on_gang, gang_name
from flows.building.retry import PATIENCE, TransientStageError, is_retryable
from flows.building.stage_request import StageRequest, build_on_node, make_request, read_request
from infra.gangs.base import GangError, GangSpec, GangState, SchedulerUnavailable
from nanochat_core.errors import ConfigError, StageError
from tests.support.flows.fixtures import ENTRY
from tests.support.flows.house import make_run


@dataclass
class Played:
    """A scheduler that runs a gang, of one node, when it is asked for its state."""

    ends: GangState = GangState(phase="finished", text="COMPLETED")  # noqa: RUF009 - frozen
    lines: list[str] = field(default_factory=list)
    builds: bool = True
    away: int = 0  # requests that get no answer
    submitted: list[GangSpec] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    live: str | None = None
    is_mute: bool = False

    def find(self, name: str) -> str | None:
        return self.live

    def submit(self, spec: GangSpec) -> str:
        self.submitted.append(spec)
        self.live = "12"
        return "12"

    def describe(self, gang: str) -> str:
        return f"job {gang}: show {gang}"

    def state(self, gang: str) -> GangState:
        if self.away:
            self.away -= 1
            raise SchedulerUnavailable("no controller")
        if self.submitted and self.builds:
            _, request = self.submitted[-1].words
            build_on_node(read_request(request), watch=lambda stage, event: None)
        return self.ends

    def cancel(self, name: str) -> None:
        if self.away:
            self.away -= 1
            raise SchedulerUnavailable("no controller")
        self.cancelled.append(name)
        self.live = None

    def logs(self, gang: str, after: str) -> tuple[list[str], str]:
        if self.is_mute:
            raise GangError("no route to the node")
        start = int(after or 0)
        return self.lines[start:], str(len(self.lines))


Call = Callable[..., Any]


@pytest.fixture
def request_(toys: Any, monkeypatch: pytest.MonkeyPatch) -> StageRequest:
    """Return the request of a toy stage, which this process opens."""
    stage = toys.stage("gpu", compute="gpu", source=ENTRY)

    def open_toy(request: StageRequest, *, watch: Any) -> Any:
        return stage, replace(toys.context(request.run), watch=watch), {}

    for module in (gangs, stage_request):
        monkeypatch.setattr(module, "open_request", open_toy)
    monkeypatch.setattr(gangs, "SLOW_SECONDS", 0.01)
    identity = look_up(stage, toys.context(), {}, force=False).identity
    run = make_run("toy-1")
    return make_request(stage, toys.context(), run, {}, identity=identity)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def call(lines: list[str]) -> Call:
    def build_it(request: StageRequest, played: Played, *, is_cancelled: bool = False) -> Any:
        def watch(stage: str, event: Any) -> None:
            lines.append(str(event.get("text", event["kind"])))

        return build_on_gang(request, played, watch=watch, is_cancelled=lambda: is_cancelled)

    return build_it


def test_a_gang_is_submitted_once_and_its_lines_are_shown(request_, call, lines):
    played = Played(lines=["0: one", "1: two"])
    built = call(request_, played)
    assert not built.cached
    [spec] = played.submitted
    assert (spec.name, spec.nodes) == (gang_name(request_), 1)
    assert spec.words[0] == "stage"
    place = (*request_.place, "grace_seconds=90")
    assert read_request(spec.words[1]) == replace(request_, place=place)
    assert {"job 12: show 12", "0: one", "1: two", "finished: COMPLETED"} < set(lines)
    assert call(request_, played).cached
    assert len(played.submitted) == 1


def test_a_gang_that_waits_or_runs_is_found_again(toys, request_, call):
    played = Played(live="7", builds=False)
    with pytest.raises(TransientStageError, match="job 7: show 7: it ended well"):
        call(request_, played)
    assert not played.submitted


def test_a_mistake_is_reported_with_the_gangs_own_words(request_, call):
    logged = ["0: error: lost", "0: hint: wait", "0: error: seed is 'x'", "0: hint: a number"]
    logged += ["1: error: an echo", "1: hint: of node 1"]
    ends = GangState(phase="failed", text="FAILED", exit_code=1)
    with pytest.raises(StageError, match="seed is 'x'") as caught:
        call(request_, Played(ends=ends, lines=logged, builds=False))
    assert caught.value.hint == "a number"
    assert not is_retryable(caught.value)
    with pytest.raises(StageError, match="job 12: show 12 failed: FAILED"):
        call(request_, Played(ends=ends, builds=False))


@pytest.mark.parametrize(
    ("ends", "match", "again"),
    [
        (GangState(phase="failed", text="FAILED", exit_code=75), "lost: FAILED", True),
        (GangState(phase="failed", text="NODE_FAIL"), "lost: NODE_FAIL", True),
        (GangState(phase="cancelled", text="CANCELLED"), "was cancelled", False),
        (GangState(phase="finished", text="COMPLETED"), "without an artifact", True),
    ],
)
def test_how_a_gang_without_an_artifact_ended(request_, call, ends, match, again):
    with pytest.raises(StageError, match=match) as caught:
        call(request_, Played(ends=ends, builds=False))
    assert is_retryable(caught.value) is again


def test_an_artifact_counts_however_the_gang_ended(request_, call):
    ends = GangState(phase="failed", text="NODE_FAIL")
    assert not call(request_, Played(ends=ends)).cached


def test_a_scheduler_that_is_away_is_waited_for(request_, call, lines):
    assert not call(request_, Played(away=3)).cached
    assert lines.count("no controller; retrying") == 1


def test_lines_that_cannot_be_read_end_nothing(request_, call, lines):
    assert not call(request_, Played(is_mute=True)).cached
    assert lines.count("its lines cannot be read: no route to the node") == 1


def test_a_scheduler_that_stays_away_is_given_up(request_, call, monkeypatch):
    clock = iter(range(0, 10 * int(PATIENCE), 100))
    times = SimpleNamespace(
        monotonic=lambda: float(next(clock)), sleep=lambda seconds: None, time=lambda: 0.0
    )
    monkeypatch.setattr("infra.retry.time", times)
    with pytest.raises(TransientStageError, match="the scheduler does not answer: no controller"):
        call(request_, Played(away=10**6))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_only_a_cancelled_caller_cancels_its_gang(request_, is_cancelled):
    def watch(stage: str, event: Any) -> None:
        if "RUNNING" in event["text"]:
            raise KeyboardInterrupt

    played = Played(ends=GangState(phase="running", text="RUNNING"), builds=False)
    with pytest.raises(KeyboardInterrupt):
        build_on_gang(request_, played, watch=watch, is_cancelled=lambda: is_cancelled)
    assert played.cancelled == ([gang_name(request_)] if is_cancelled else [])


def test_a_cancel_without_a_known_gang_cancels_all_of_the_name(request_, call, monkeypatch):
    """Such as two jobs, of which the submission of the first got no answer."""

    def interrupted(request: StageRequest, *, watch: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(gangs, "open_request", interrupted)
    played = Played(away=2)
    with pytest.raises(KeyboardInterrupt):
        call(request_, played, is_cancelled=True)
    assert played.cancelled == [gang_name(request_)]


def test_a_cancel_without_an_answer_names_the_gang_that_still_runs(request_, lines, monkeypatch):
    monkeypatch.setattr(gangs, "CANCEL_PATIENCE", 0.0)
    played = Played(ends=GangState(phase="running", text="RUNNING"), builds=False)

    def watch(stage: str, event: Any) -> None:
        lines.append(event["text"])
        if "RUNNING" in event["text"]:
            played.away = 10**6
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_on_gang(request_, played, watch=watch, is_cancelled=lambda: True)
    assert played.cancelled == []
    assert lines[-1].startswith("job 12: show 12 still runs: the scheduler does not answer: no")


def test_a_refusal_of_the_scheduler_is_not_tried_again(request_, call):
    class Refusing(Played):
        def submit(self, spec: GangSpec) -> str:
            raise GangError("sbatch: invalid partition")

    with pytest.raises(StageError, match="invalid partition") as caught:
        call(request_, Refusing())
    assert not is_retryable(caught.value)


def test_a_request_that_is_none_is_refused(request_):
    good = asdict(request_)
    for text in ("", "[]", json.dumps({**good, "nodes": "two"}), json.dumps({**good, "x": 1})):
        with pytest.raises(ConfigError, match="not a stage request"):
            read_request(text)
    assert read_request(json.dumps(good)) == request_
