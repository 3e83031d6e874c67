"""Resume crashed runs that Prefect's automation missed, and give up runs that never begin.

The automation resumes a run within 15 seconds, if the event reaches it. With its history in SQLite
a busy server drops events now and then ("database is locked"), and a run whose crash was dropped
would stay crashed. Switching the automation off switches this off too.

An automation cannot count either. A flow counts its own starts and ends after some; but a process
that cannot even import the flow, after a broken upgrade, would be restarted for ever.
"""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

from infra.prefect.access import ask
from infra.prefect.supervisor.runs import AUTO_RESUME

AUTOMATION = "nanochat-auto-resume"  # its name; deployments/automations.py makes it
SECONDS_BETWEEN = 10.0
SECONDS_OF_AUTOMATION = 45.0  # the automation of a busy server may take that long
_MOST_SECONDS = 3600.0  # a run that crashed longer ago was left so by a person
_ANSWER_SECONDS = 5.0
MOST_CRASHES = 10  # of a run that never began


class Resuming:
    """The keeper's periodic look for crashed runs."""

    def __init__(self, *, say: Callable[[str], None]) -> None:
        self._say = say
        self._next = 0.0

    def look(self, api_url: str) -> None:
        """Resume or give up the runs that are found; retry later if the server does not answer."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SECONDS_BETWEEN
        try:
            for flow_run in forgotten(api_url, now=time.time()):
                resume(api_url, flow_run)
                self._say(f"run {flow_run}: resumed, its crash was overlooked")
            for flow_run in hopeless(api_url):
                give_up(api_url, flow_run)
                self._say(f"run {flow_run}: crashed {MOST_CRASHES} times before it began; given up")
        except (OSError, ValueError):
            return


def forgotten(api_url: str, *, now: float) -> list[str]:
    """Return crashed flow runs that the automation should have resumed; none if it is off.

    `now` is in unix seconds. Raises OSError if Prefect does not answer.
    """
    ages = {run["id"]: now - _seconds(run["state"]["timestamp"]) for run in _crashed(api_url)}
    late = [i for i, age in ages.items() if SECONDS_OF_AUTOMATION < age < _MOST_SECONDS]
    return late if late and _is_on(api_url) else []


def resume(api_url: str, flow_run: str) -> None:
    """Schedule the run again, unless it was resumed meanwhile."""
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "resumed after a crash"}
    _ask(api_url, f"/flow_runs/{flow_run}/set_state", {"state": state, "force": False})


def hopeless(api_url: str) -> list[str]:
    """Return the flow runs to be resumed that crashed MOST_CRASHES times and never began."""
    # Prefect counts a run's starts itself: 0 means that its code never ran.
    waiting = [run["id"] for run in _crashed(api_url) if not run["run_count"]]
    return [flow_run for flow_run in waiting if _crashes(api_url, flow_run) >= MOST_CRASHES]


def give_up(api_url: str, flow_run: str) -> None:
    """Stop resuming the run automatically. A person still may, with Retry on its page."""
    path = f"/flow_runs/{flow_run}"
    tags = ask(api_url, path, seconds=_ANSWER_SECONDS)["tags"]
    body = {"tags": [tag for tag in tags if tag != AUTO_RESUME]}
    ask(api_url, path, body=body, seconds=_ANSWER_SECONDS, method="PATCH")


def _crashed(api_url: str) -> list[dict[str, Any]]:
    """Return the crashed runs that are to be resumed, the last crashed first."""
    wanted = {"state": {"type": {"any_": ["CRASHED"]}}, "tags": {"all_": [AUTO_RESUME]}}
    body = {"flow_runs": wanted, "sort": "END_TIME_DESC", "limit": 50}
    return _ask(api_url, "/flow_runs/filter", body)


def _crashes(api_url: str, flow_run: str) -> int:
    states = ask(api_url, f"/flow_run_states/?flow_run_id={flow_run}", seconds=_ANSWER_SECONDS)
    return sum(state["type"] == "CRASHED" for state in states)


def _is_on(api_url: str) -> bool:
    named = {"automations": {"name": {"any_": [AUTOMATION]}}}
    return any(found["enabled"] for found in _ask(api_url, "/automations/filter", named))


def _ask(api_url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = ask(api_url, path, body=body, seconds=_ANSWER_SECONDS)
    return cast("list[dict[str, Any]]", answer)


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
