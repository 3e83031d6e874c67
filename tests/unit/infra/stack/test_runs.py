"""The requests that a supervisor sends about runs, answered by a scripted server."""

import os
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from infra.prefect.supervisor import runs

SHOWN = "2027-01-15T08:00:00+00:00"


class Server:
    """A Prefect server with one flow run, whose state and heartbeats the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.error: Exception | None = None
        self.beats: tuple[int, str] | None = (1, SHOWN)  # how many, and when the last
        self.lines: list[str] = []
        self.sent: list[str] = []  # states that were asked for
        self.accepts = True
        self.history = ["RUNNING"]
        self.since = datetime(2026, 1, 1, tzinfo=UTC)  # when it began
        self.labels: dict[str, int] = {}
        self.pid: str | None = None  # of the process that a worker started for it
        monkeypatch.setattr(runs, "ask", self.ask)
        monkeypatch.setattr(runs, "end_task_runs", lambda url, run, why: None)
        monkeypatch.setattr(runs, "set_state", self.set_state)
        monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    @property
    def run(self) -> dict[str, Any]:
        """The flow run, as it is now."""
        state = {"id": f"state-{len(self.history)}", "timestamp": self.since.isoformat()}
        tree = {"id": "run", "name": "toy", "tags": [runs.AUTO_RESUME], "labels": self.labels}
        tree |= {"infrastructure_pid": self.pid, "work_pool_name": None}
        return {**tree, "state_type": self.history[-1], "state": state}

    def ask(
        self,
        api_url: str,
        path: str,
        *,
        body: Any = None,
        method: Any = None,
        may_lack: bool = False,
    ) -> Any:
        if self.error is not None:
            raise self.error
        if path == "/flow_runs/filter":
            is_asked = self.history[-1] in body["flow_runs"]["state"]["type"]["any_"]
            return [self.run] if is_asked else []
        if path == "/flow_runs/run" and method is None:
            return self.run
        if path.startswith("/flow_run_states/"):
            return [{"id": f"state-{n + 1}", "type": kind} for n, kind in enumerate(self.history)]
        if path.startswith("/events/"):
            value = {"value": "prefect.flow-run.run"}
            return (
                [value | dict(zip(("count", "end_time"), self.beats, strict=True))]
                if self.beats
                else []
            )
        assert method == "PATCH", path
        self.labels |= body
        return None

    def set_state(self, url: str, run: str, kind: str, *why: Any, **options: Any) -> bool:
        self.sent.append(kind)
        if self.accepts:
            self.history.append(kind)
        return self.accepts

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


RESUMED, OURS = ["CRASHED", "SCHEDULED"], str(os.getpid())
CANCELLING, UNBEGUN = ["RUNNING", "CANCELLING"], ["PENDING", "CANCELLING"]
RETRIED = [*CANCELLING, "CANCELLED", "SCHEDULED", "PENDING", "CRASHED"]


def case(quiet: tuple[int, ...], second: int, states: list[str], **facts: Any) -> tuple[Any, ...]:
    """Polls that ask for nothing, one and the states that it asks for, and what the run is."""
    return quiet, second, states, facts


RUNS = {
    "silent": case((0, 85), 91, RESUMED),
    "never sent a heartbeat": case((0, 100), 1000, [], beats=None),
    # Its machine may be about to begin it.
    "cancelled, never sent one": case((0, 1000), 2000, [], history=CANCELLING, beats=None),
    "began earlier": case((0,), 91, RESUMED, is_own=True, beats=None, pid=OURS),
    "a retry that dies before it runs": case((0,), 11, ["SCHEDULED"], history=RETRIED),
    "silent while it is cancelled": case((0, 85), 91, ["CANCELLED"], history=CANCELLING),
    # It may end itself.
    "just cancelled": case((0, 9), 11, ["CANCELLED"], is_own=True, history=UNBEGUN, beats=None),
    # It lives, though its process is unknown, until it is silent.
    "sends heartbeats": case((0, 60), 91, ["CANCELLED"], is_own=True, history=CANCELLING),
}


@pytest.mark.parametrize("run", RUNS)
def test_what_becomes_of_a_run(server: Server, run: str) -> None:
    quiet, second, states, facts = RUNS[run]
    watch = server.watch(is_own=facts.get("is_own", False))
    for name, value in facts.items():
        setattr(server, name, [*value] if name == "history" else value)
    assert poll(server, watch, *quiet) == []
    assert poll(server, watch, second) == states
    assert server.labels == ({runs.RESUMES: 1} if "SCHEDULED" in states else {})
    assert poll(server, watch, second + 10, second + 100) == states


def test_after_an_outage_of_the_server_each_run_has_the_whole_time_again(server: Server) -> None:
    watch = server.watch()
    poll(server, watch, 0, 80)
    server.error = ConnectionRefusedError()
    poll(server, watch, 199)
    server.error = None
    assert poll(server, watch, 200, 285) == []
    assert poll(server, watch, 291) == ["CRASHED", "SCHEDULED"]


def test_a_supervisor_that_was_held_still_gives_each_run_the_whole_time_again(
    server: Server,
) -> None:
    watch = server.watch()
    poll(server, watch, 80)
    server.seconds = 230
    assert poll(server, watch, 231, 320) == []
    assert poll(server, watch, 322) == RESUMED


def test_a_supervisor_that_was_held_still_within_a_request_does_so_too(
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
    assert poll(server, watch, 322) == RESUMED


def test_a_run_that_no_process_began_is_resumed_though_the_server_is_often_busy(
    server: Server,
) -> None:
    server.history, server.beats = ["PENDING"], None
    watch = server.watch()
    for second in range(0, 300, 20):
        poll(server, watch, second)
        server.error = TimeoutError()
        poll(server, watch, second + 10)
        server.error = None
    assert poll(server, watch, 300) == []  # half of the time the server did not answer
    assert poll(server, watch, *range(310, 440, 10)) == []
    assert poll(server, watch, 451) == ["CRASHED", "SCHEDULED"]


def test_of_an_own_server_one_whose_process_is_still_starting_is_not_resumed(
    server: Server,
) -> None:
    server.history, server.beats, server.pid = ["PENDING"], None, str(os.getpid())
    watch = server.watch(is_own=True)
    assert poll(server, watch, 0, 301, 900) == []
    server.pid = str(2**22 + 1)  # more than Linux gives
    assert poll(server, watch, 905) == ["CRASHED", "SCHEDULED"]


def test_a_heartbeat_counts_also_from_a_clock_that_was_set_back(server: Server) -> None:
    watch = server.watch()
    for number in range(1, 20):
        server.beats = (number, SHOWN)  # the latest of all times stands still
        assert poll(server, watch, 30.0 * number) == []


def test_of_an_own_server_one_whose_process_ended_is_resumed(server: Server) -> None:
    server.beats, server.since = None, datetime.now(UTC) + timedelta(seconds=5)
    server.pid = str(os.getpid())
    watch = server.watch(is_own=True)
    assert poll(server, watch, 0, 100) == []
    server.pid = "unix:///var/run/docker.sock:4f1c"  # of another type of pool
    assert poll(server, watch, 100.5) == []
    server.pid = None  # it was not reported
    assert poll(server, watch, 100.7) == []
    assert server.lines == []
    server.pid = str(2**22 + 1)  # more than Linux gives
    assert poll(server, watch, 101) == ["CRASHED", "SCHEDULED"]


def test_a_refused_transition_is_asked_for_again(server: Server) -> None:
    watch = server.watch()
    server.accepts = False
    poll(server, watch, 0, 91, 96)
    assert server.sent == ["CRASHED", "CRASHED"]
    assert server.lines == []


def test_of_two_supervisors_one_resumes(server: Server) -> None:
    server.history.append("CRASHED")
    first, second = server.watch(), server.watch()
    poll(server, first, 0)
    poll(server, second, 0)
    listed = server.run
    assert poll(server, first, 11) == ["SCHEDULED"]
    server.history.append("RUNNING")
    assert second._settle("api", listed)  # it listed the run before
    listed = server.run  # silent
    server.history += [*RESUMED, "PENDING"]
    assert second._settle("api", listed)
    assert server.sent == ["SCHEDULED"]


GONE = str(2**22 + 1)  # more than Linux gives


@pytest.mark.parametrize(
    ("pid", "beats", "seconds"),
    # Of a process that has ended the worker has half a minute to report it.
    [(None, None, 0), (GONE, None, 30), (GONE, (1, SHOWN), 30)],
)
def test_of_an_own_server_one_that_is_cancelled_and_has_no_process_is_cancelled_soon(
    server: Server, pid: str | None, beats: tuple[int, str] | None, seconds: int
) -> None:
    server.history.append("CANCELLING")
    server.since = datetime.now(UTC) + timedelta(seconds=5)
    server.beats, server.pid = beats, str(os.getpid())
    watch = server.watch(is_own=True)
    assert poll(server, watch, 0, 60) == []  # it saves
    server.pid = pid
    assert poll(server, watch, *range(61, 61 + seconds)) == []
    assert poll(server, watch, 61 + seconds) == ["CANCELLED"]
    assert server.lines == ["run toy: it was cancelled and has no process"]


def test_an_answer_that_is_not_prefects_is_logged_once(server: Server) -> None:
    server.error = KeyError("state")
    poll(server, server.watch(), 0, 5, 10)
    assert server.lines == ["crashed runs are not resumed: KeyError: 'state'"]
