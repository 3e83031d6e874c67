"""What Prefect is told of the runs of a worker that is gone, and asked of those that are there.

A worker that is stopped or killed says nothing of its runs: Prefect shows them as running until
their heartbeats are missed. The keeper knows better and says so at once. A run that is tagged
`auto-resume` is then started again, by the automation for crashed runs or, when the stack itself
stops, by the next worker there is; others are left to whoever started them.
"""

import urllib.error
from datetime import datetime
from typing import Any, cast

from infra.prefect.access import ask

AUTO_RESUME = "auto-resume"  # tag of runs that go on by themselves after a crash
_SECONDS = 10.0  # for an answer of a busy server
_UNFINISHED = ("PENDING", "RUNNING")


def report_lost(api_url: str, flow_run: str, why: str, *, until: float, resume: bool) -> bool:
    """Tell Prefect that the run's process is gone, unless its end is known; False: try again.

    One that began after `until`, in unix seconds, is left alone: it goes on elsewhere by now. With
    `resume`, one that may be resumed waits for the next worker.
    """
    try:
        run = _read(api_url, flow_run)
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
        return error.code < 500  # it was deleted, or we may not
    except (OSError, ValueError):
        return False
    return True


def is_polling(api_url: str, pool: str, worker: str, *, since: float) -> bool:
    """Whether the pool has heard of the worker after `since`, in unix seconds."""
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
