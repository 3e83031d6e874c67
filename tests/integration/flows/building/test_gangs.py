"""A stage request on a gang: submitted once, followed, found again, and explained when it ends."""

import json
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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
    away: int = 0  # requests for its state that get no answer
    submitted: list[GangSpec] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # of it, to the caller
    live: str | None = None

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
        self.cancelled.append(name)
        self.live = None

    def logs(self, gang: str, after: str) -> tuple[list[str], str]:
        start = int(after or 0)
        return self.lines[start:], str(len(self.lines))


RUNNING = GangState(phase="running", text="RUNNING")


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


def call(
    request: StageRequest, played: Played, *, until: str | None = None, is_cancelled: bool = False
) -> Any:
    """Build on the gang; a line with the text `until` interrupts that."""

    def watch(stage: str, event: Any) -> None:
        played.shown.append(str(event.get("text", event["kind"])))
        if until is not None and until in played.shown[-1]:
            raise KeyboardInterrupt

    return build_on_gang(request, played, watch=watch, is_cancelled=lambda: is_cancelled)


def test_a_gang_is_submitted_once_and_its_lines_are_shown(request_):
    played = Played(lines=["0: one", "1: two"])
    built = call(request_, played)
    assert not built.cached
    [spec] = played.submitted
    assert (spec.name, spec.nodes) == (gang_name(request_), 1)
    assert spec.words[0] == "stage"
    place = (*request_.place, "grace_seconds=90")
    assert read_request(spec.words[1]) == replace(request_, place=place)
    assert {"job 12: show 12", "0: one", "1: two", "finished: COMPLETED"} < set(played.shown)
    assert call(request_, played).cached
    assert len(played.submitted) == 1


def test_a_gang_that_waits_or_runs_is_found_again(toys, request_):
    played = Played(live="7", builds=False)
    with pytest.raises(TransientStageError, match="job 7: show 7: it ended well"):
        call(request_, played)
    assert not played.submitted


def test_a_mistake_is_reported_with_the_gangs_own_words(request_):
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
def test_how_a_gang_without_an_artifact_ended(request_, ends, match, again):
    with pytest.raises(StageError, match=match) as caught:
        call(request_, Played(ends=ends, builds=False))
    assert is_retryable(caught.value) is again


def test_an_artifact_counts_however_the_gang_ended(request_):
    ends = GangState(phase="failed", text="NODE_FAIL")
    assert not call(request_, Played(ends=ends)).cached


def test_a_scheduler_that_is_away_is_waited_for(request_):
    played = Played(away=3)
    assert not call(request_, played).cached
    assert played.shown.count("no controller; retrying") == 1


def test_lines_that_cannot_be_read_end_nothing(request_, monkeypatch):
    played = Played()
    monkeypatch.setattr(played, "logs", Mock(side_effect=GangError("no route to the node")))
    assert not call(request_, played).cached
    assert played.shown.count("its lines cannot be read: no route to the node") == 1


def test_a_scheduler_that_stays_away_is_given_up(request_, monkeypatch):
    clock = iter(range(0, 10 * int(PATIENCE), 100))
    times = SimpleNamespace(
        monotonic=lambda: float(next(clock)), sleep=lambda seconds: None, time=lambda: 0.0
    )
    monkeypatch.setattr("infra.retry.time", times)
    with pytest.raises(TransientStageError, match="the scheduler does not answer: no controller"):
        call(request_, Played(away=10**6))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_only_a_cancelled_caller_cancels_its_gang(request_, is_cancelled):
    played = Played(ends=RUNNING, builds=False)
    with pytest.raises(KeyboardInterrupt):
        call(request_, played, until="RUNNING", is_cancelled=is_cancelled)
    assert played.cancelled == ([gang_name(request_)] if is_cancelled else [])


def test_a_cancel_without_a_known_gang_cancels_all_of_the_name(request_, monkeypatch):
    """Such as two jobs, of which the submission of the first got no answer."""
    away = SchedulerUnavailable("no controller")
    played, cancel = Played(), Mock(side_effect=[away, away, None])
    monkeypatch.setattr(played, "cancel", cancel)
    monkeypatch.setattr(gangs, "open_request", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        call(request_, played, is_cancelled=True)
    cancel.assert_called_with(gang_name(request_))
    assert cancel.call_count == 3


def test_a_cancel_without_an_answer_names_the_gang_that_still_runs(request_, monkeypatch):
    monkeypatch.setattr(gangs, "CANCEL_PATIENCE", 0.0)
    played = Played(ends=RUNNING, builds=False)
    away = Mock(side_effect=SchedulerUnavailable("no controller"))
    monkeypatch.setattr(played, "cancel", away)
    with pytest.raises(KeyboardInterrupt):
        call(request_, played, until="RUNNING", is_cancelled=True)
    said = "job 12: show 12 still runs: the scheduler does not answer: no controller"
    assert played.shown[-1] == said


def test_a_refusal_of_the_scheduler_is_not_tried_again(request_, monkeypatch):
    played, refused = Played(), GangError("sbatch: invalid partition")
    monkeypatch.setattr(played, "submit", Mock(side_effect=refused))
    with pytest.raises(StageError, match="invalid partition") as caught:
        call(request_, played)
    assert not is_retryable(caught.value)


def test_a_request_that_is_none_is_refused(request_):
    good = asdict(request_)
    for text in ("", "[]", json.dumps({**good, "nodes": "two"}), json.dumps({**good, "x": 1})):
        with pytest.raises(ConfigError, match="not a stage request"):
            read_request(text)
    assert read_request(json.dumps(good)) == request_
