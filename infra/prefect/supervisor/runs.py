"""Report the lost runs of a dead worker to Prefect, and ask whether a worker polls.

A worker that is stopped or killed does not report its runs: Prefect shows them as running until
their heartbeats are missed. The keeper reports them as crashed at once. A run that is tagged
`auto-resume` is then resumed, by the automation for crashed runs or, when the stack itself stops,
by the next worker; other runs are left to their owners.
"""

import urllib.error
from datetime import datetime
from typing import Any, cast

from infra.prefect.access import ask

AUTO_RESUME = "auto-resume"  # tag of runs that are resumed automatically after a crash
_SECONDS = 10.0  # timeout of a request to a busy server
_UNFINISHED = ("PENDING", "RUNNING")


def report_lost(api_url: str, flow_run: str, why: str, *, until: float, resume: bool) -> bool:
    """Report to Prefect that the run's process is gone, unless the run has ended.

    Returns False if the report has to be retried. A run that began after `until`, in unix seconds,
    is left alone: it continues elsewhere. With `resume`, a run that may be resumed is scheduled for
    the next worker.
    """
    try:
        run = _read(api_url, flow_run)
        # A run in a final state has reported its own end.
        if run["state"]["type"] in _UNFINISHED:
            if datetime.fromisoformat(run["state"]["timestamp"]).timestamp() > until:
                return True
            crashed = {"type": "CRASHED", "name": "Crashed", "message": why}
            _set(api_url, flow_run, crashed, force=False)
            run = _read(api_url, flow_run)
        if resume and run["state"]["type"] == "CRASHED" and AUTO_RESUME in run["tags"]:
            later = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": why}
            _set(api_url, flow_run, later, force=True)
    except urllib.error.HTTPError as error:
        return error.code < 500  # the run was deleted, or we lack the right: no retry helps
    except (OSError, ValueError):
        return False
    return True


def is_polling(api_url: str, pool: str, worker: str, *, since: float) -> bool:
    """Return whether the worker has polled its pool since `since`, in unix seconds."""
    try:
        found = ask(api_url, f"/work_pools/{pool}/workers/filter", body={})
    except (OSError, ValueError):
        return False
    beats = (item["last_heartbeat_time"] for item in found if item["name"] == worker)
    return any(beat and datetime.fromisoformat(beat).timestamp() >= since for beat in beats)


def _read(api_url: str, flow_run: str) -> dict[str, Any]:
    return cast("dict[str, Any]", ask(api_url, f"/flow_runs/{flow_run}", seconds=_SECONDS))


def _set(api_url: str, flow_run: str, state: dict[str, str], *, force: bool) -> None:
    body = {"state": state, "force": force}
    ask(api_url, f"/flow_runs/{flow_run}/set_state", body=body, seconds=_SECONDS)
