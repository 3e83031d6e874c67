"""Prefect's HTTP API as its pages use it: what they send when a person presses their buttons.

Nothing here imports Prefect or the product: what a browser can do is all that this can.
"""

import functools
import time
import uuid
from collections.abc import Generator, Mapping
from datetime import datetime
from http import HTTPStatus
from typing import Any

import httpx

from tests.support.flows import waiting

wait_until = functools.partial(waiting.wait_until, every=0.25)  # what they look at takes long
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
CHANGES = ("POST", "PUT", "PATCH", "DELETE")
_PAGE = 200  # the most that the API gives at once
_BUSY_SECONDS = 60.0  # on SQLite a busy server says now and then that it has no time


def unix(moment: str) -> float:
    """Return a moment of Prefect's in seconds since 1970."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


class Login(httpx.Auth):
    """Basic authentication with CSRF protection, as Prefect's pages do it, and their retries."""

    requires_response_body = True

    def __init__(self, api_url: str, password: str) -> None:
        self._api_url = api_url.rstrip("/")
        self._basic = httpx.BasicAuth(*password.split(":", 1))
        self._client = uuid.uuid4().hex
        self._token: str | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """Send the request with the password, and with a token if it changes something.

        It is sent again while the server is busy, as Prefect's own client does.
        """
        if request.method in CHANGES and self._token is None:
            asked = httpx.Request("GET", f"{self._api_url}/csrf-token?client={self._client}")
            answer: Any = yield from self._send(asked)
            self._token = answer.json()["token"] if answer.status_code == 200 else ""
        if self._token:
            request.headers["Prefect-Csrf-Token"] = self._token
            request.headers["Prefect-Csrf-Client"] = self._client
        answer = yield from self._send(request)
        if answer.status_code == 403:
            self._token = None  # it lives for an hour, or the server has another history

    def _send(
        self, request: httpx.Request
    ) -> Generator[httpx.Request, httpx.Response, httpx.Response]:
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            answer = yield next(self._basic.auth_flow(request))
            if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                return answer
            time.sleep(0.1)


class PrefectApi:
    """One server. Requests that do not reach it are tried again for `patience` seconds."""

    def __init__(self, url: str, *, password: str | None = None, patience: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._client = httpx.Client(
            base_url=f"{self.url}/",
            auth=None if password is None else Login(self.url, password),
            timeout=30.0,
            trust_env=False,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request, whatever its answer says. Raises httpx.HTTPError when none comes."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                response = self._client.request(method, path, json=body)
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            else:
                if response.status_code < 500 or time.monotonic() > deadline:
                    return response
            time.sleep(0.5)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return what a request answers; fail if its status is no success."""
        response = self.send(method, path, {} if (method, body) == ("POST", None) else body)
        assert response.is_success, response.text
        return response.json() if response.content else None

    get = functools.partialmethod(_ask, "GET")
    post = functools.partialmethod(_ask, "POST")
    patch = functools.partialmethod(_ask, "PATCH")
    put = functools.partialmethod(_ask, "PUT")
    delete = functools.partialmethod(_ask, "DELETE")

    def answers(self) -> bool:
        """Whether the server is there right now."""
        try:
            return self._client.get("health", timeout=2.0).json() is True
        except (httpx.HTTPError, ValueError):
            return False

    def deployment(self, name: str) -> Any:
        """A deployment by its name, flow/deployment."""
        return self.get(f"deployments/name/{name}")

    def automations(self) -> dict[str, Any]:
        """All automations by name; two of a name are a mistake."""
        found = self.post("automations/filter", {"limit": _PAGE})
        assert len({a["name"] for a in found}) == len(found)
        return {a["name"]: a for a in found}

    def start(self, deployment: Any, **parameters: Any) -> httpx.Response:
        """Ask for a run with these parameters and no more."""
        path = f"deployments/{deployment['id']}/create_flow_run"
        return self.send("POST", path, {"parameters": parameters})

    def submit_form(
        self, deployment: Mapping[str, Any], values: Mapping[str, Any], *, name: str
    ) -> httpx.Response:
        """What the run form sends: all its fields, those changed by `values`. May be refused."""
        details = ("pause_reschedule", "deferred", "untrackable_result")
        counts = ("max_retries", "retry_delay_seconds", "retries", "retry_delay")
        return self.send(
            "POST",
            f"deployments/{deployment['id']}/create_flow_run",
            {
                "name": name,
                "work_queue_name": deployment["work_queue_name"],
                "empirical_policy": {"resuming": False, **dict.fromkeys(counts, 0)},
                "state": {
                    "type": "SCHEDULED",
                    "message": "",
                    "state_details": {**dict.fromkeys(details, False), "scheduled_time": None},
                },
                "tags": deployment["tags"],
                "enforce_parameter_schema": deployment["enforce_parameter_schema"],
                "parameters": {**deployment["parameters"], **values},
            },
        )

    def trigger(
        self, deployment: Mapping[str, Any], values: Mapping[str, Any], *, name: str = "by-hand"
    ) -> str:
        """A run made with the form; gives its id."""
        return self.submit_form(deployment, values, name=name).raise_for_status().json()["id"]

    def set_state(self, run: str, kind: str, message: str = "", **state: str) -> None:
        """Say that a run is in a state, as its process would, or a button of its page."""
        state |= {"type": kind.upper(), "message": message}
        answer = self.post(f"flow_runs/{run}/set_state", {"state": state, "force": True})
        # A run that no worker has taken yet has nothing to end: the server cancels it at once.
        assert answer["status"] == "ACCEPT" or answer["state"]["type"] == "CANCELLED", answer

    def press_retry(self, run: str) -> None:
        """What the button Retry of a run's page sends."""
        self.set_state(run, "scheduled", "Retry from the UI", name="AwaitingRetry")

    def press_cancel(self, run: str) -> None:
        """What the button Cancel of a run's page sends."""
        self.set_state(run, "cancelling", name="Cancelling")

    def run(self, run: str) -> dict[str, Any]:
        """A flow run."""
        return self.get(f"flow_runs/{run}")

    def state(self, run: str) -> Any:
        """A run's state: its name, type and message among others."""
        return self.run(run)["state"]

    def states(self, run: str) -> list[dict[str, Any]]:
        """All states that a run had, the oldest first."""
        found: list[dict[str, Any]] = self.get(f"flow_run_states/?flow_run_id={run}")
        return sorted(found, key=lambda each: each["timestamp"])

    def runs(self, **filters: Any) -> list[dict[str, Any]]:
        """Flow runs, newest first; filters as in flow_runs={...} or deployments={...}."""
        return self._filter("flow_runs", "EXPECTED_START_TIME_DESC", **filters)

    def runs_of(self, deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every run of a deployment, newest first."""
        return self.runs(deployments={"id": {"any_": [deployment["id"]]}})

    def task_runs(self, run: str) -> list[dict[str, Any]]:
        """Task runs of a flow run, in the order they were made."""
        return self._filter(
            "task_runs", "EXPECTED_START_TIME_ASC", flow_runs={"id": {"any_": [run]}}
        )

    def artifacts(self, run: str) -> list[dict[str, Any]]:
        """Artifacts of a flow run, of its tasks too, newest first."""
        wanted = {"flow_run_id": {"any_": [run]}}
        return self._filter("artifacts", "CREATED_DESC", artifacts=wanted)

    def logs(self, run: str) -> list[dict[str, Any]]:
        """Log lines of a flow run, oldest first."""
        lines: list[dict[str, Any]] = []
        wanted = {"flow_run_id": {"any_": [run]}}
        while page := self._filter("logs", "TIMESTAMP_ASC", logs=wanted, offset=len(lines)):
            lines += page
        return lines

    def _filter(self, kind: str, sort: str, **filters: Any) -> list[dict[str, Any]]:
        return self.post(f"{kind}/filter", {"sort": sort, "limit": _PAGE, **filters})

    def wait_for_end(self, run: str, *, seconds: float) -> dict[str, Any]:
        """The run once its state is final. Raises AssertionError after so many seconds."""
        return wait_until(
            lambda: found if (found := self.run(run))["state_type"] in FINAL else None,
            seconds=seconds,
            what=f"run {run} to end",
        )
