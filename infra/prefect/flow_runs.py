"""Submit, look up and change flow runs through the API of a running Prefect server.

Prefect is not imported, so the commands that use this start at once.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from infra.polling import ANSWER_SECONDS, SLOW_SECONDS
from infra.prefect.access import NO_ANSWER, ServerError, ask, check_answers, find_refusal
from infra.prefect.server import adopt_password, find_server, shared_server
from infra.retry import RetryPolicy, until_answered
from nanochat_core.errors import ConfigError

AUTO_RESUME = "auto-resume"  # tag of runs that are resumed after a crash: see supervisor/runs.py
RESUMES = "nanochat.resumes"  # label: how often a run was resumed since it last got further
LIVE = ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING")
PAGE_SIZE = 200  # objects in an answer
_SUBMISSION = RetryPolicy(tries=4, longest_wait=SLOW_SECONDS)  # of a request that creates a run
_unanswered: dict[str, float] = {}  # URL of an API -> when it last did not answer


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """A flow run as the server describes it."""

    name: str
    type: str  # of its state: SCHEDULED, PENDING, RUNNING, COMPLETED, FAILED, CRASHED, ...
    state: str  # what the pages show: Late, Resumed, ...
    message: str
    pool: str | None  # whose workers run it
    id: str
    tags: tuple[str, ...]
    since: float  # unix seconds: when it got into its state

    @property
    def is_live(self) -> bool:
        """Return whether it has not ended: it lives, or it crashed and will be resumed."""
        return self.type in LIVE or self.is_lost

    @property
    def is_lost(self) -> bool:
        """Return whether it crashed, and will be resumed without a command."""
        return self.type == "CRASHED" and AUTO_RESUME in self.tags


def page_of(ui_url: str, flow_run: str) -> str:
    """Return the address of a flow run's page, in the look of pages that `nanochat up` leads to.

    Prefect's own addresses are of its older pages, below the root of a server.
    """
    root = ui_url if "prefect.cloud" in ui_url else f"{ui_url}/v2"
    return f"{root}/runs/flow-run/{flow_run}"


def running_server(home: Path) -> str:
    """Return the URL of the API of the server that `home` uses. Starts none.

    Raises ServerError if none runs, it does not answer, or it refuses our password.
    """
    adopt_password(home)
    if (api_url := find_api(home)) is None:
        raise ServerError(
            "no Prefect server is running, and so no worker",
            hint="start both with: nanochat up",
        )
    check_answers(api_url)
    return api_url


def submit(api_url: str, deployment: str, parameters: Mapping[str, Any], *, name: str) -> str:
    """Create a run of the deployment FLOW/NAME; return its id.

    `name` must be new: it is the idempotency key, so that a repeated request creates no second run.
    A request that gets no answer is repeated a few times, as of a server that is busy.

    Raises ConfigError if there is no such deployment, or the server refuses a parameter or the
    password, ServerError if it does not answer.
    """
    body = {"name": name, "parameters": dict(parameters), "idempotency_key": name}

    def create() -> str | None:
        try:
            if (found := find_deployment(api_url, deployment)) is None:
                return None
            return str(ask(api_url, f"/deployments/{found['id']}/create_flow_run", body=body)["id"])
        except NO_ANSWER as error:
            if (refusal := find_refusal(error)) is not None:
                raise refusal from error
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise ServerError(
                f"no answer of the Prefect server at {api_url}: {why}",
                hint=f"run {name} may have been created; before you submit again, look with: "
                f"nanochat status {name}",
            ) from error

    if (created := until_answered(create, ServerError, policy=_SUBMISSION)) is None:
        raise ConfigError(
            f"{api_url} has no deployment {deployment}",
            hint="register it with: nanochat up --register",
        )
    return created


def find_api(home: Path) -> str | None:
    """Return the URL of the API of the server that `home` uses; None if none runs."""
    server = find_server(home)
    return shared_server(home) or (server.api_url if server else None)


def find_flow_runs(home: Path, run: str) -> list[FlowRun] | None:
    """Return the flow runs of the run with this id: its own, and the stages it requested.

    None means that nothing is known, since no server runs or answers, or lately did not answer.
    """
    api_url = find_api(home)
    since = _unanswered.get(api_url or "", -ANSWER_SECONDS)
    if api_url is None or time.monotonic() - since < ANSWER_SECONDS:
        return None
    chosen = {"operator": "or_", "name": {"any_": [run]}, "tags": {"all_": [f"run:{run}"]}}
    body = {"flow_runs": chosen, "limit": PAGE_SIZE}
    try:
        adopt_password(home)
        return [_parse(tree) for tree in ask(api_url, "/flow_runs/filter", body=body)]
    except (*NO_ANSWER, ServerError):  # or no client can be made
        _unanswered[api_url] = time.monotonic()
        return None


def find_deployment(api_url: str, deployment: str) -> Any:
    """Return the deployment FLOW/NAME as the server describes it, or None.

    Raises one of NO_ANSWER.
    """
    flow, _, name = deployment.partition("/")
    path = f"/deployments/name/{quote(flow, safe='')}/{quote(name, safe='')}"
    return ask(api_url, path, may_lack=True)


def _parse(tree: Mapping[str, Any]) -> FlowRun:
    state: Mapping[str, Any] = tree.get("state") or {}
    return FlowRun(
        name=str(tree["name"]),
        type=str(tree.get("state_type") or ""),
        state=str(tree.get("state_name") or ""),
        message=str(state.get("message") or ""),
        pool=tree.get("work_pool_name"),
        id=str(tree.get("id") or ""),
        tags=tuple(tree.get("tags") or ()),
        since=datetime.fromisoformat(state["timestamp"]).timestamp() if "timestamp" in state else 0,
    )


def report_ended(
    home: Path, found: Sequence[FlowRun] | None, why: str, *, as_completed: bool = False
) -> bool:
    """End these flow runs of a run that has no process; see `find_flow_runs`.

    Those that live are set to Crashed; all to Completed if the run is known to have finished, also
    one that Prefect's engine made Failed since it could not report that. Returns whether nothing is
    left to report. Requests of stages are not touched: their workers live. Asks only a server that
    runs.
    """
    api_url = find_api(home)
    if found is None or api_url is None:
        # A home in which Prefect was never started has nothing to report. The directory of its
        # server is still there after `nanochat down`, wherever the database is.
        return shared_server(home) is None and not (home / "prefect").exists()
    try:
        for flow_run in found:
            if any(tag.startswith("request:") for tag in flow_run.tags):
                continue
            if flow_run.is_live or as_completed:
                state = "COMPLETED" if as_completed else "CRASHED"
                set_state(api_url, flow_run.id, state, why, force=True)
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
        "limit": PAGE_SIZE,
    }
    for task_run in ask(api_url, "/task_runs/filter", body=body):
        # Forced: Prefect's rules let the end of a task run through from its own process only.
        set_state(api_url, task_run["id"], "CRASHED", why, force=True, of="task_runs")
    bars = {"flow_run_id": {"any_": [flow_run]}, "type": {"any_": ["progress"]}}
    for bar in ask(api_url, "/artifacts/filter", body={"artifacts": bars, "limit": PAGE_SIZE}):
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
