"""Requests to Prefect about flow runs: report lost ones, and resume overlooked ones.

A worker that is stopped or killed does not report its runs: Prefect shows them as running until
their heartbeats are missed. The supervisor reports them as crashed at once. A run that is tagged
`auto-resume` is then resumed by the automation for crashed runs, or, when the stack itself stops,
by the next worker; other runs are left to their owners.

The automation resumes a run within 15 seconds, if the event reaches it. With its history in SQLite
a busy server drops events now and then ("database is locked"), so the supervisor resumes a run that
stayed crashed, unless the automation is switched off.
"""

import urllib.error
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import quote

from infra.prefect.access import ask, may_pass

AUTO_RESUME = "auto-resume"  # tag of runs that are resumed automatically after a crash
AUTOMATION = "nanochat-auto-resume"  # its name; deployments/automations.py makes it
SECONDS_OF_AUTOMATION = 45.0  # the automation of a busy server may take that long
MAX_SECONDS_CRASHED = 3600.0  # a run that crashed longer ago was left so by its user
_MOST_RUNS = 50  # that crashed last, in one look


def report_lost(api_url: str, flow_run: str, why: str, *, until: float, resume: bool) -> bool:
    """Report to Prefect that the run's process is gone, unless the run has ended.

    Returns whether that changed the run. A run that began after `until`, in unix seconds, is left
    alone: it continues elsewhere. With `resume`, a run that may be resumed is scheduled for the
    next worker. Raises OSError or ValueError if Prefect cannot answer now.
    """
    is_changed = False
    try:
        run = ask(api_url, f"/flow_runs/{flow_run}")
        # A run in a final state has reported its own end.
        if run["state"]["type"] in ("PENDING", "RUNNING"):
            if _seconds(run) > until:
                return False
            _set_state(api_url, flow_run, "CRASHED", "Crashed", why)
            is_changed = True
            run = ask(api_url, f"/flow_runs/{flow_run}")
        if resume and run["state"]["type"] == "CRASHED" and AUTO_RESUME in run["tags"]:
            _set_state(api_url, flow_run, "SCHEDULED", "AwaitingRetry", why, force=True)
            is_changed = True
    except urllib.error.HTTPError as error:
        if may_pass(error):
            raise
        # The run was deleted, or we lack the right: no retry helps.
    return is_changed


def look_for_crashed(api_url: str, *, now: float, log: Callable[[str], None]) -> None:
    """Resume crashed runs that the automation missed, unless it is switched off.

    `now` is in unix seconds. Raises OSError or ValueError if Prefect cannot answer now.
    """
    wanted = {"state": {"type": {"any_": ["CRASHED"]}}, "tags": {"all_": [AUTO_RESUME]}}
    body = {"flow_runs": wanted, "sort": "END_TIME_DESC", "limit": _MOST_RUNS}
    named = {"automations": {"name": {"any_": [AUTOMATION]}}}
    if not any(found["enabled"] for found in ask(api_url, "/automations/filter", body=named)):
        return
    for run in ask(api_url, "/flow_runs/filter", body=body):
        if SECONDS_OF_AUTOMATION < now - _seconds(run) < MAX_SECONDS_CRASHED:
            # Not forced: Prefect refuses it for a run that was resumed meanwhile.
            _set_state(api_url, run["id"], "SCHEDULED", "AwaitingRetry", "resumed after a crash")
            log(f"run {run['id']}: resumed, its crash was overlooked")


def is_polling(api_url: str, pool: str, worker: str, *, since: float) -> bool:
    """Return whether the worker has polled its pool since `since`, in unix seconds."""
    try:
        found = ask(api_url, f"/work_pools/{quote(pool, safe='')}/workers/filter", body={})
    except (OSError, ValueError):
        return False
    beats = (item["last_heartbeat_time"] for item in found if item["name"] == worker)
    return any(beat and datetime.fromisoformat(beat).timestamp() >= since for beat in beats)


def _set_state(
    api_url: str, flow_run: str, kind: str, name: str, message: str, *, force: bool = False
) -> None:
    body = {"state": {"type": kind, "name": name, "message": message}, "force": force}
    ask(api_url, f"/flow_runs/{flow_run}/set_state", body=body)


def _seconds(run: dict[str, Any]) -> float:
    """Return since when, in unix seconds, a run is in its state."""
    return datetime.fromisoformat(run["state"]["timestamp"]).timestamp()
