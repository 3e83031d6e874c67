"""Resume deployed runs whose process died: the one place that decides it.

A deployed run sends Prefect a heartbeat every 30 seconds. One that is silent for three of them, or
that a worker took and never began, is set to Crashed, or to Cancelled if it was being cancelled. A
crashed run with the tag `auto-resume` is scheduled again, until it was resumed ten times in a row
without progress: then it fails. Each supervisor polls its server.
"""

import itertools
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import httpx

from infra.prefect.access import NO_ANSWER, ask, find_refusal
from infra.prefect.flow_runs import AUTO_RESUME, PAGE_SIZE, RESUMES, end_task_runs, set_state
from infra.prefect.supervisor.workers import SILENT_SECONDS
from nanochat_core.runtime.process_start import start_of

# The flows whose deployed runs are watched: their workers let them send heartbeats often enough.
FLOWS = ("nanochat", "nanochat-eval", "sweep", "one-stage")
PENDING_SECONDS = 300.0  # from a worker's taking a run to its start; on a busy machine a minute
QUEUED_SECONDS = 3600.0  # the same where a run may wait for a node, as on Kubernetes
# A worker reports a killed process twice, some six seconds apart. If the run were resumed at the
# first report, the second one would set the running attempt to Crashed.
SETTLED_SECONDS = 10.0
# From the end of a cancelled run's process until its worker sets it to Cancelled: 6 on an idle
# machine. A run that is Cancelled before, and retried, is set to Cancelled again.
CANCEL_SECONDS = 30.0
MAX_RESUMES = 10  # in a row without progress
_BEGUN = ("RUNNING", "CANCELLING")  # states of a run that a process executes
_ENDS = {  # state -> why a run that is found dead in it is ended
    "PENDING": "its worker did not start it",
    "RUNNING": f"no heartbeat for {SILENT_SECONDS:g} s",
    "CANCELLING": "it was cancelled and has no process",
}


class RunWatch:
    """Looks for dead runs of one server, again and again."""

    def __init__(self, log: Callable[[str], object], *, is_own: bool) -> None:
        """`is_own`: the server is that of a home, for this machine alone."""
        self._log = log
        self._is_own = is_own
        # Flow run id -> its state, heartbeats, and whether its process has ended while it is
        # cancelled, and since when they are these: monotonic seconds of this process, so that no
        # clock of another machine counts.
        self._seen: dict[str, tuple[tuple[str, str | None, bool], float]] = {}
        self._polled = time.monotonic()
        # From here on heartbeats are counted: so a count only grows, whatever the clocks say.
        self._started = datetime.now(UTC)
        self._began = self._started - timedelta(hours=1)
        self._problem = ""  # the last one that was logged

    def poll(self, api_url: str) -> None:
        """End silent runs and resume crashed ones. An answer that is not Prefect's is logged."""
        problem = ""
        try:
            self._poll(api_url)
        except NO_ANSWER as error:
            self._forget_silence()
            refusal = find_refusal(error)
            if refusal or not isinstance(error, httpx.HTTPError | OSError):
                why = refusal or f"{type(error).__name__}: {error}"
                problem = f"crashed runs are not resumed: {why}"
        self._polled = time.monotonic()
        if problem and problem != self._problem:
            self._log(problem)
        self._problem = problem

    def _forget_silence(self) -> None:
        """Leave out the time since the last poll."""
        # While the server is down heartbeats get lost: runs that send them have the whole time
        # again. For others the time without an answer does not count; a busy server that leaves
        # one request in five minutes unanswered must not keep them from being resumed.
        away = time.monotonic() - self._polled
        self._seen = {
            run: (mark, since + away)
            for run, (mark, since) in self._seen.items()
            if mark[1] is None or since == math.inf
        }
        self._polled += away

    def _poll(self, api_url: str) -> None:
        runs = [*_find(api_url, "PENDING", *_BEGUN), *_find(api_url, "CRASHED")]
        running = [run["id"] for run in runs if run["state_type"] in _BEGUN]
        beats = _heartbeats(api_url, running, since=self._began)
        # A process that was held still, as in a paused container, may find heartbeats late.
        if time.monotonic() - self._polled > SILENT_SECONDS / 2:
            self._forget_silence()
        now, before = time.monotonic(), self._seen
        self._seen = {}
        for run in runs:
            # The end of a cancelled run's process too: its worker reports it some seconds later.
            has_ended = run["state_type"] == "CANCELLING" and self._is_alive(run) is False
            mark = (run["state"]["id"], beats.get(run["id"]), has_ended)
            known, since = before.get(run["id"], (mark, now))
            self._seen[run["id"]] = (mark, since if known == mark else now)
        for run in runs:
            is_alive, is_cancelled = self._is_alive(run), run["state_type"] == "CANCELLING"
            # One that is cancelled before it has a process gets none any more. One with heartbeats
            # has a process, whose number its worker could not report.
            has_none = not run["infrastructure_pid"] and run["id"] not in beats
            never_began = self._is_own and is_cancelled and has_none
            is_dead = never_began or is_alive is False
            if run["state_type"] == "PENDING" and is_alive:
                continue  # its process is starting; resumed, it would run twice
            if run["state_type"] in _BEGUN and run["id"] not in beats:
                # Of a run that sends none silence says nothing. But a process of this machine may
                # have ended, as all did that began under an earlier supervisor.
                since = datetime.fromisoformat(run["state"]["timestamp"])
                if not (is_dead or (self._is_own and since <= self._started)):
                    continue
            mark, since = self._seen[run["id"]]
            limit = _limit(api_url, run, now - since)
            if is_cancelled and is_dead:
                limit = SETTLED_SECONDS if never_began else CANCEL_SECONDS
            if now - since >= limit and self._settle(api_url, run):
                self._seen[run["id"]] = (mark, math.inf)

    def _is_alive(self, run: dict[str, Any]) -> bool | None:
        """Return whether the run's process lives; None if it is not known to be of this machine."""
        pid = run["infrastructure_pid"] or ""
        return bool(start_of(int(pid))) if self._is_own and pid.isdigit() else None

    def _settle(self, api_url: str, run: dict[str, Any]) -> bool:
        """Set a dead run to Crashed or Cancelled, end what it began on the pages, and resume it.

        Returns whether that is done, by this process or another one.
        """
        found = ask(api_url, f"/flow_runs/{run['id']}", may_lack=True)
        # Another supervisor may have resumed it since it was listed.
        if found is None or found["state"]["id"] != run["state"]["id"]:
            return True
        if why := _ENDS.get(run["state_type"]):
            end = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
            # Never forced: Prefect refuses it for a run that ended meanwhile.
            if not set_state(api_url, run["id"], end, why):
                return False
            self._log(f"run {run['name']}: {why}")
        end_task_runs(api_url, run["id"], "its process ended")
        return AUTO_RESUME not in run["tags"] or self._resume(api_url, run)

    def _resume(self, api_url: str, run: dict[str, Any]) -> bool:
        found = ask(api_url, f"/flow_run_states/?flow_run_id={run['id']}")
        states = [each["type"] for each in found][::-1]  # the present one first
        if states[0] != "CRASHED":  # resumed or cancelled meanwhile
            return True
        attempt = itertools.takewhile(lambda each: each not in ("RUNNING", "SCHEDULED"), states)
        labels: dict[str, int] = run["labels"] or {}
        resumes = labels.get(RESUMES, 0)
        if "CANCELLING" in attempt:
            return set_state(api_url, run["id"], "CANCELLED", "cancelled by the user", force=True)
        if resumes >= MAX_RESUMES:
            why = f"it was resumed {resumes} times and got no further"
            hint = "find in its logs what ended it; a new run resumes from what is stored"
            self._log(f"run {run['name']}: {why}")
            return set_state(api_url, run["id"], "FAILED", f"{why}\nhint: {hint}", force=True)
        # Before the run is scheduled: from then on its process may reset the number.
        path = f"/flow_runs/{run['id']}/labels"
        ask(api_url, path, body={RESUMES: resumes + 1}, method="PATCH")
        # Prefect refuses a second transition of one id, as another supervisor would send it.
        crash = found[-1]["id"]
        why = "resumed after a crash"
        is_done = set_state(api_url, run["id"], "SCHEDULED", why, "AwaitingRetry", once=crash)
        if is_done:
            self._log(f"run {run['name']}: {why}")
        return is_done


def _find(api_url: str, *states: str) -> list[dict[str, Any]]:
    """Return deployed runs of our flows in these states, those that ended last first."""
    chosen = {"state": {"type": {"any_": states}}, "deployment_id": {"is_null_": False}}
    body = {"flow_runs": chosen, "flows": {"name": {"any_": FLOWS}}, "sort": "END_TIME_DESC"}
    return ask(api_url, "/flow_runs/filter", body={**body, "limit": PAGE_SIZE})


def _heartbeats(api_url: str, runs: list[str], *, since: datetime) -> dict[str, str]:
    """Return how many heartbeats each of these runs sent, and when the last; without those of none.

    The text changes with each heartbeat, also if the clock of the run's machine was set back.
    """
    if not runs:
        return {}
    until = datetime.now(UTC) + timedelta(days=1)  # more than clocks differ
    chosen = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{run}" for run in runs]},
        "occurred": {"since": since.isoformat(), "until": until.isoformat()},
    }
    found = ask(api_url, "/events/count-by/resource", body={"filter": chosen})
    return {
        each["value"].rpartition(".")[2]: f"{each['count']} {each['end_time']}" for each in found
    }


def _limit(api_url: str, run: dict[str, Any], seconds: float) -> float:
    """Return for how many seconds the run may stay as it is; it has for `seconds`."""
    if run["state_type"] != "PENDING":
        return SETTLED_SECONDS if run["state_type"] == "CRASHED" else SILENT_SECONDS
    if seconds < PENDING_SECONDS or run["work_pool_name"] is None:
        return PENDING_SECONDS
    pool = ask(api_url, f"/work_pools/{quote(run['work_pool_name'], safe='')}")
    return PENDING_SECONDS if pool["type"] == "process" else QUEUED_SECONDS
