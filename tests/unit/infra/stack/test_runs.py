"""What a supervisor decides about runs, by the answers of a scripted server."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from infra.prefect.flow_runs import AUTO_RESUME, RESUMES
from infra.prefect.supervisor import runs
from infra.prefect.supervisor.runs import MAX_RESUMES

SHOWN = "2027-01-15T08:00:00+00:00"
OURS, GONE = str(os.getpid()), str(2**22 + 1)  # processes: this one, and more than Linux gives
LATER = datetime(2100, 1, 1, tzinfo=UTC)  # after the supervisor started
RESUMED = ("CRASHED", "SCHEDULED")
PENDING, CRASHED, CANCELLING = ("PENDING",), ("RUNNING", "CRASHED"), ("RUNNING", "CANCELLING")
DIED_CANCELLED = (*CANCELLING, "CRASHED", "CRASHED")
RETRIED = (*CANCELLING, "CANCELLED", "SCHEDULED", "PENDING", "CRASHED")
Step: TypeAlias = tuple[float, tuple[str, ...], dict[str, Any]]


class Server:
    """A Prefect server with one flow run, whose state and heartbeats the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.error: Exception | None = None
        self.beats: tuple[int, str] | None = (1, SHOWN)  # how many, and when the last
        self.lines: list[str] = []
        self.sent: list[str] = []  # states that were asked for
        self.ended: list[str] = []  # runs whose task runs were ended
        self.accepts = True  # transitions that are not forced
        self.history: tuple[str, ...] = ("RUNNING",)
        self.since = datetime(2026, 1, 1, tzinfo=UTC)  # when it began
        self.tags = (AUTO_RESUME,)
        self.labels: dict[str, int] = {}
        self.pid: str | None = None  # of the process that a worker started for it
        self.pool: str | None = None  # its type is its name
        self.on_end: Callable[[], None] = lambda: None  # called when its task runs are ended
        monkeypatch.setattr(runs, "ask", self.ask)
        monkeypatch.setattr(runs, "end_task_runs", self.end_task_runs)
        monkeypatch.setattr(runs, "set_state", self.set_state)
        monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    @property
    def run(self) -> dict[str, Any]:
        """The flow run, as it is now."""
        state = {"id": f"state-{len(self.history)}", "timestamp": self.since.isoformat()}
        tree = {"id": "run", "name": "toy", "tags": self.tags, "labels": self.labels}
        tree |= {"infrastructure_pid": self.pid, "work_pool_name": self.pool}
        return {**tree, "state_type": self.history[-1], "state": state}

    def ask(self, api_url: str, path: str, *, body: Any = None, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        if path == "/flow_runs/filter":
            is_asked = self.history[-1] in body["flow_runs"]["state"]["type"]["any_"]
            return [self.run] if is_asked else []
        if path == "/flow_runs/run":
            return self.run
        if path.startswith("/flow_run_states/"):
            return [{"id": f"state-{n + 1}", "type": kind} for n, kind in enumerate(self.history)]
        if path.startswith("/work_pools/"):
            return {"type": path.rpartition("/")[2]}
        if path.startswith("/events/"):
            names = ("value", "count", "end_time")
            found = self.beats and ("prefect.flow-run.run", *self.beats)
            return [dict(zip(names, found, strict=True))] if found else []
        assert (path, options["method"]) == ("/flow_runs/run/labels", "PATCH")
        self.labels |= body
        return None

    def set_state(self, url: str, run: str, kind: str, *why: Any, **options: Any) -> bool:
        # A resume names the crash: of those that two supervisors send Prefect accepts one.
        assert bool(options.get("once")) == (kind == "SCHEDULED")
        self.sent.append(kind)
        if is_accepted := self.accepts or options.get("force", False):
            self.history += (kind,)
        return is_accepted

    def end_task_runs(self, url: str, run: str, why: str) -> None:
        self.ended.append(run)
        self.on_end()

    def watch(self, *, is_own: bool = False) -> runs.RunWatch:
        """A supervisor's look at it."""
        return runs.RunWatch(self.lines.append, is_own=is_own)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def poll(server: Server, watch: runs.RunWatch, *seconds: float) -> list[str]:
    """Poll at these times and every 20 s before; return the states that were asked for."""
    for second in seconds:
        between = range(int(server.seconds) + 20, int(second), 20)
        for server.seconds in (*between, second):
            watch.poll("api")
    return server.sent


def at(second: float, *sent: str, **facts: Any) -> Step:
    """At this second, after these facts have changed, these states have been asked for."""
    return second, sent, facts


RUNS = {
    "silent": [at(0), at(85), at(91, *RESUMED)],
    "silent, not to be resumed": [at(0, tags=()), at(91, "CRASHED")],
    "never sent a heartbeat": [at(0, beats=None), at(100), at(1000)],
    # Its machine may be about to begin it.
    "cancelled, never sent one": [at(0, history=CANCELLING, beats=None), at(1000), at(2000)],
    "silent while it is cancelled": [at(0, history=CANCELLING), at(85), at(91, "CANCELLED")],
    "died while it was cancelled": [at(0, history=DIED_CANCELLED), at(11, "CANCELLED")],
    "a retry that dies before it runs": [at(0, history=RETRIED), at(11, "SCHEDULED")],
    "a crash that is reported again": [
        *(at(0, history=CRASHED), at(6), at(7, history=(*CRASHED, "CRASHED")), at(16)),
        at(18, "SCHEDULED"),
    ],
    "not begun": [at(0, history=PENDING, pool="process"), at(299), at(301, *RESUMED)],
    "not begun, in a cluster": [at(0, history=PENDING, pool="kubernetes"), at(3599)],
    "not begun for an hour": [at(0, history=PENDING, pool="kubernetes"), at(3601, *RESUMED)],
    # Half of the time the server does not answer.
    "not begun, and the server is often busy": [
        at(0, history=PENDING, beats=None),
        *(at(s, error=TimeoutError() if s % 20 else None) for s in range(10, 301, 10)),
        *(at(second) for second in range(310, 440, 10)),
        at(451, *RESUMED),
    ],
    # Afterwards each run has the whole time again.
    "silent after an outage of the server": [
        *(at(0), at(80), at(199, error=ConnectionRefusedError()), at(200, error=None), at(285)),
        at(291, *RESUMED),
    ],
    "the supervisor was held still": [at(80), at(231, seconds=230), at(320), at(322, *RESUMED)],
    # The latest of all times stands still.
    "its machine's clock was set back": [at(30 * n, beats=(n, SHOWN)) for n in range(1, 20)],
}
# Of a home's own server, whose runs have their processes on this machine.
OWN = {
    "began earlier": [at(0, beats=None, pid=OURS), at(91, *RESUMED)],
    "its process is starting": [
        *(at(0, history=PENDING, beats=None, pid=OURS), at(301), at(900)),
        at(905, *RESUMED, pid=GONE),
    ],
    "its process ended": [
        *(at(0, beats=None, pid=OURS, since=LATER), at(100)),
        at(100.5, pid="unix:///var/run/docker.sock:4f1c"),  # of another type of pool
        at(100.7, pid=None),  # it was not reported
        at(101, *RESUMED, pid=GONE),
    ],
    # It may end itself.
    "just cancelled": [
        *(at(0, history=("PENDING", "CANCELLING"), beats=None), at(9)),
        at(11, "CANCELLED"),
    ],
    # It lives, though its process is unknown, until it is silent.
    "cancelled, sends heartbeats": [at(0, history=CANCELLING), at(60), at(91, "CANCELLED")],
    "cancelled, its process is not known": [
        *(at(0, history=CANCELLING, beats=None, pid=OURS, since=LATER), at(60)),
        at(61, "CANCELLED", pid=None),
    ],
    # The worker has half a minute to report it.
    "cancelled, its process ended": [
        *(at(0, history=CANCELLING, beats=None, pid=OURS, since=LATER), at(60)),
        *(at(61, pid=GONE), at(90), at(91, "CANCELLED")),
    ],
    "cancelled, its process with heartbeats ended": [
        *(at(0, history=CANCELLING, pid=OURS, since=LATER), at(60), at(61, pid=GONE), at(90)),
        at(91, "CANCELLED"),
    ],
}


@pytest.mark.parametrize("run", [*RUNS, *OWN])
def test_what_becomes_of_a_run(server: Server, run: str) -> None:
    watch = server.watch(is_own=run in OWN)
    for second, sent, facts in {**RUNS, **OWN}[run]:
        for name, value in facts.items():
            setattr(server, name, value)
        assert poll(server, watch, second) == [*sent], second
    sent = [*server.sent]
    assert server.labels == ({RESUMES: 1} if "SCHEDULED" in sent else {})
    assert server.ended == (["run"] if sent else [])
    if sent:
        assert poll(server, watch, server.seconds + 10, server.seconds + 100) == sent


def test_a_supervisor_that_was_held_still_within_a_request_gives_the_whole_time_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = server.watch()
    poll(server, watch, 80)

    def ask_slowly(*arguments: Any, **options: Any) -> Any:
        answer = server.ask(*arguments, **options)
        server.seconds = 230
        return answer

    monkeypatch.setattr(runs, "ask", ask_slowly)
    server.seconds = 85
    watch.poll("api")
    monkeypatch.setattr(runs, "ask", server.ask)
    assert poll(server, watch, 235, 315) == []
    assert poll(server, watch, 322) == [*RESUMED]


def test_a_refused_transition_is_asked_for_again(server: Server) -> None:
    watch = server.watch()
    server.accepts = False
    poll(server, watch, 0, 91, 96)
    assert server.sent == ["CRASHED", "CRASHED"]
    assert server.lines == server.ended == []


@pytest.mark.parametrize("decided", ["CANCELLED", "RUNNING"])
def test_what_is_decided_while_the_watch_looks_at_a_run_stays(server: Server, decided: str) -> None:
    server.history = CRASHED

    def decide() -> None:
        server.history += (decided,)

    server.on_end = decide
    assert poll(server, server.watch(), 0, 11, 30) == []


def test_of_two_supervisors_one_resumes(server: Server) -> None:
    server.history += ("CRASHED",)
    first, second = server.watch(), server.watch()
    poll(server, first, 0)
    poll(server, second, 0)
    listed = server.run
    assert poll(server, first, 11) == ["SCHEDULED"]
    server.history += ("RUNNING",)
    assert second._settle("api", listed)  # it listed the run before
    listed = server.run  # silent
    server.history += (*RESUMED, "PENDING")
    assert second._settle("api", listed)
    assert server.sent == ["SCHEDULED"]


def test_an_answer_that_is_not_prefects_is_logged_once(server: Server) -> None:
    server.error = KeyError("state")
    poll(server, server.watch(), 0, 5, 10)
    assert server.lines == ["crashed runs are not resumed: KeyError: 'state'"]


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        ({}, ["no heartbeat for 90 s", "resumed after a crash"]),
        ({"history": CANCELLING}, ["it was cancelled and has no process"]),
        ({"history": PENDING}, ["its worker did not start it", "resumed after a crash"]),
        (
            {"history": CRASHED, "labels": {RESUMES: MAX_RESUMES}},
            ["it was resumed 10 times and got no further"],
        ),
    ],
)
def test_the_reason_of_each_decision_is_logged(
    server: Server, facts: dict[str, Any], reasons: list[str]
) -> None:
    for name, value in facts.items():
        setattr(server, name, value)
    poll(server, server.watch(), 0, 301)
    assert server.lines == [f"run toy: {reason}" for reason in reasons]
