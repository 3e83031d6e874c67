"""Show runs whose process is gone as ended on Prefect's pages.

Prefect learns the end of a flow run or a task run from its process. One that was killed is shown as
running for ever, with the progress bars that it had.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.prefect.access import ask, configured_api_url
from infra.prefect.flow_runs import LIVE, MOST, NO_ANSWER, FlowRun, find_api


def report_ended(home: Path, found: Sequence[FlowRun] | None, why: str) -> bool:
    """Set these flow runs of a run that has no process to Crashed; see `find_flow_runs`.

    Returns whether nothing is left to report. Requests of stages are not touched: their workers
    live. Asks only a server that runs.
    """
    api_url = find_api(home)
    if found is None or api_url is None:
        # A home in which Prefect was never started has nothing to report. The directory of its
        # server is still there after `nanochat down`, wherever the database is.
        return configured_api_url() is None and not (home / "prefect").exists()
    try:
        for flow_run in found:
            if flow_run.is_request:
                continue
            if flow_run.is_live:
                set_state(api_url, flow_run.id, "CRASHED", why, force=True)
            end_task_runs(api_url, flow_run.id, why)
    except NO_ANSWER:
        return False
    return True


def end_task_runs(api_url: str, flow_run: str, why: str) -> None:
    """Set unfinished task runs of a flow run to Crashed, and delete its unfinished progress bars.

    The caller knows that no process runs them. Raises OSError, ValueError if Prefect cannot answer.
    """
    body = {
        "flow_runs": {"id": {"any_": [flow_run]}},
        "task_runs": {"state": {"type": {"any_": LIVE}}},
        "limit": MOST,
    }
    for task_run in ask(api_url, "/task_runs/filter", body=body):
        # Forced: Prefect's rules let the end of a task run through from its own process only.
        set_state(api_url, task_run["id"], "CRASHED", why, force=True, of="task_runs")
    bars = {"flow_run_id": {"any_": [flow_run]}, "type": {"any_": ["progress"]}}
    for bar in ask(api_url, "/artifacts/filter", body={"artifacts": bars, "limit": MOST}):
        if bar["data"] != 100:
            # With a body, since only requests with one carry the token that the server wants.
            ask(api_url, f"/artifacts/{bar['id']}", body={}, method="DELETE", may_lack=True)


def set_state(
    api_url: str,
    run: str,
    state_type: str,
    why: str,
    name: str | None = None,
    *,
    force: bool = False,
    once: str | None = None,
    of: str = "flow_runs",
) -> bool:
    """Set the state of a run; return whether it has it: without `force` Prefect's rules apply.

    False also if the run was deleted. Of several transitions for the sake of `once`, an id, only
    the first counts. Raises OSError, ValueError if Prefect cannot answer.
    """
    state: dict[str, Any] = {"type": state_type, "name": name, "message": why}
    if once is not None:
        state["state_details"] = {"transition_id": once}
    body = {"state": state, "force": force}
    answer = ask(api_url, f"/{of}/{run}/set_state", body=body, may_lack=True)
    return bool(answer) and answer["status"] == "ACCEPT"
