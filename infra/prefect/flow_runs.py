"""Submit and look up flow runs through the API of a running Prefect server.

Prefect is not imported, so the commands that use this start at once.
"""

import http.client
import json
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from infra.polling import ANSWER_SECONDS, SLOW_SECONDS
from infra.prefect.access import (
    ServerError,
    ask,
    check_answers,
    configured_api_url,
    may_pass,
    refused_password,
)
from infra.prefect.records import find_process_of_server
from infra.prefect.server import adopt_password, wait_for_own_server, wait_for_server
from infra.retry import RetryPolicy, until_answered
from nanochat_core.errors import ConfigError, NanochatError

AUTO_RESUME = "auto-resume"  # tag of runs that are resumed after a crash: see supervisor/runs.py
RESUMES = "nanochat.resumes"  # label: how often a run was resumed since it last got further
LIVE = ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING")
MOST = 200  # objects in an answer
_SUBMISSION = RetryPolicy(tries=4, longest_wait=SLOW_SECONDS)  # of a request that creates a run
# No JSON, or JSON of another form, is the answer of a proxy.
NO_ANSWER = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError)
_unanswered: dict[str, float] = {}  # URL of an API -> when it last did not answer


class NoAnswerError(ServerError):
    """An error of the server, or on the way to it, that may pass."""


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

    @property
    def is_request(self) -> bool:
        """Return whether it builds one stage, requested by a run."""
        return any(tag.startswith("request:") for tag in self.tags)


def page_of(ui_url: str, flow_run: str) -> str:
    """Return the address of a flow run's page, in the look of pages that `nanochat up` leads to.

    Prefect's own addresses are of its older pages, below the root of a server.
    """
    root = ui_url if "prefect.cloud" in ui_url else f"{ui_url}/v2"
    return f"{root}/runs/flow-run/{flow_run}"


def running_server(home: Path) -> str:
    """Return the URL of the API of the server that `home` uses. Starts none.

    Raises ServerError if none runs, or it refuses our password.
    """
    api_url = configured_api_url()
    if api_url is None:
        wait_for_own_server(home)
        server = find_process_of_server(home)
        if server is None:
            raise ServerError(
                "no Prefect server is running, and so no worker",
                hint="start both with: nanochat up",
            )
        wait_for_server(home, server)
        api_url = server.api_url
    adopt_password(home)
    check_answers(api_url)
    return api_url


def has_deployment(api_url: str, deployment: str) -> bool:
    """Return whether the server has the deployment FLOW/NAME. Raises OSError without an answer."""
    return _find_deployment(api_url, deployment) is not None


def submit(api_url: str, deployment: str, parameters: Mapping[str, Any], *, name: str) -> str:
    """Create a run of the deployment FLOW/NAME; return its id.

    `name` must be new: it is the idempotency key, so that a repeated request creates no second run.
    A request that gets no answer is repeated a few times.

    Raises ConfigError if there is no such deployment, or the server refuses a parameter,
    ServerError if it refuses the password or does not answer.
    """
    try:
        found = _find_deployment(api_url, deployment)
        path = f"/deployments/{found['id']}/create_flow_run" if found is not None else None
    except NO_ANSWER as error:
        again = "nothing was submitted: run the same command again once the server answers"
        raise _explain(api_url, error, hint=again) from error
    if path is None:
        raise ConfigError(
            f"{api_url} has no deployment {deployment}",
            hint="register it with: nanochat up --register",
        )
    body = {"name": name, "parameters": dict(parameters), "idempotency_key": name}

    def create() -> str:
        try:
            return str(ask(api_url, path, body=body)["id"])
        except NO_ANSWER as error:
            raise _explain(
                api_url,
                error,
                hint=f"run {name} may have been created; before you submit again, look with: "
                f"nanochat status {name}",
                refused="nothing was submitted; the log of the server may say more",
            ) from error

    return until_answered(create, NoAnswerError, policy=_SUBMISSION)


def find_api(home: Path) -> str | None:
    """Return the URL of the API of the server that `home` uses; None if none runs."""
    server = find_process_of_server(home)
    return configured_api_url() or (server.api_url if server else None)


def find_flow_runs(home: Path, run: str) -> list[FlowRun] | None:
    """Return the flow runs of the run with this id: its own, and the stages it requested.

    None means that nothing is known, since no server runs or answers, or lately did not answer.
    """
    api_url = find_api(home)
    since = _unanswered.get(api_url or "", -ANSWER_SECONDS)
    if api_url is None or time.monotonic() - since < ANSWER_SECONDS:
        return None
    chosen = {"operator": "or_", "name": {"any_": [run]}, "tags": {"all_": [f"run:{run}"]}}
    body = {"flow_runs": chosen, "limit": MOST}
    try:
        adopt_password(home)
        return [_parse(tree) for tree in ask(api_url, "/flow_runs/filter", body=body)]
    except (*NO_ANSWER, ServerError):  # or our password is malformed
        _unanswered[api_url] = time.monotonic()
        return None


def _find_deployment(api_url: str, deployment: str) -> Any:
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


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(str(json.loads(error.read())["detail"]).split())
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


def _explain(
    api_url: str, error: Exception, *, hint: str, refused: str | None = None
) -> NanochatError:
    """Return the error of a request, in one line: NoAnswerError with this hint if it may pass.

    `refused` is the hint for a refusal that has none of its own; None means `hint`.
    """
    if not isinstance(error, urllib.error.HTTPError):
        what = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, OSError | http.client.HTTPException):
            what = f"its answer is not Prefect's ({what})"
        return NoAnswerError(f"no answer of the Prefect server at {api_url}: {what}", hint=hint)
    detail = _detail(error)
    if may_pass(error):
        return NoAnswerError(f"the Prefect server at {api_url} has failed: {detail}", hint=hint)
    if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return refused_password(api_url)
    if error.code in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
        refused = "if the code is newer than the deployment, run: nanochat up --register"
    return ConfigError(f"the Prefect server refuses the request: {detail}", hint=refused or hint)
