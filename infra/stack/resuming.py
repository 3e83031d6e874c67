"""Crashed runs that nobody resumed are resumed by the keeper.

Prefect's automation does it within a quarter of a minute, if the event reaches it. With its history
in SQLite a busy server drops events now and then ("database is locked"), and a run whose crash was
dropped would stay crashed. Switching the automation off switches this off too.
"""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

from infra.prefect_access import ask
from infra.stack.runs import AUTO_RESUME

AUTOMATION = "nanochat-auto-resume"  # its name; deployments/automations.py makes it
SECONDS_BETWEEN = 10.0
SECONDS_OF_AUTOMATION = 45.0  # for it to act; a busy server takes that long
_MOST_SECONDS = 3600.0  # what crashed longer ago is what a person left so
_ANSWER_SECONDS = 5.0


class Resuming:
    """Looks for forgotten runs now and again."""

    def __init__(self, *, say: Callable[[str], None]) -> None:
        self._say = say
        self._next = 0.0

    def look(self, api_url: str) -> None:
        """Resume what is found; what cannot be asked or told is left for the next time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SECONDS_BETWEEN
        try:
            for flow_run in forgotten(api_url, now=time.time()):
                resume(api_url, flow_run)
                self._say(f"run {flow_run}: resumed, its crash was overlooked")
        except (OSError, ValueError):
            return


def forgotten(api_url: str, *, now: float) -> list[str]:
    """Flow runs that crashed a while ago and are to be resumed; none with the automation off.

    Raises OSError when Prefect cannot be asked.
    """
    wanted = {"state": {"type": {"any_": ["CRASHED"]}}, "tags": {"all_": [AUTO_RESUME]}}
    crashed = _ask(
        api_url, "/flow_runs/filter", {"flow_runs": wanted, "sort": "END_TIME_DESC", "limit": 50}
    )
    ages = {run["id"]: now - _seconds(run["state"]["timestamp"]) for run in crashed}
    late = [i for i, age in ages.items() if SECONDS_OF_AUTOMATION < age < _MOST_SECONDS]
    return late if late and _is_on(api_url) else []


def resume(api_url: str, flow_run: str) -> None:
    """Have the run wait for a worker, unless it was resumed meanwhile."""
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "resumed after a crash"}
    _ask(api_url, f"/flow_runs/{flow_run}/set_state", {"state": state, "force": False})


def _is_on(api_url: str) -> bool:
    named = {"automations": {"name": {"any_": [AUTOMATION]}}}
    return any(found["enabled"] for found in _ask(api_url, "/automations/filter", named))


def _ask(api_url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = ask(api_url, path, body=body, seconds=_ANSWER_SECONDS)
    return cast("list[dict[str, Any]]", answer)


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
