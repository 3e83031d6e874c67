"""Prefect's HTTP API, as its pages and other programs use it."""

from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:  # Prefect is imported once its settings are those of a server
    from prefect.client.orchestration import SyncPrefectClient


class PrefectApi:
    """The API of a server. What it refuses is an assertion that failed, unless it is asked for.

    Prefect's own client asks again while a server is busy, as it is on SQLite now and then.
    """

    def __init__(self, client: "SyncPrefectClient") -> None:
        self._client = client

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The answer."""
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPStatusError as refused:
            return refused.response

    def get(self, path: str) -> Any:
        """What is there."""
        return self._told(self.send("GET", path))

    def post(self, path: str, body: Any = None) -> Any:
        """What came of it."""
        return self._told(self.send("POST", path, body or {}))

    def patch(self, path: str, body: Any) -> None:
        """Change what is there."""
        self._told(self.send("PATCH", path, body))

    def put(self, path: str, body: Any) -> None:
        """Replace what is there."""
        self._told(self.send("PUT", path, body))

    def delete(self, path: str) -> None:
        """It is there no more."""
        self._told(self.send("DELETE", path))

    def deployment(self, full_name: str) -> Any:
        """A deployment by flow/name."""
        return self.get(f"/deployments/name/{full_name}")

    def start(self, deployment: Any, **parameters: Any) -> httpx.Response:
        """Ask for a run, as the form's button does."""
        path = f"/deployments/{deployment['id']}/create_flow_run"
        return self.send("POST", path, {"parameters": parameters})

    def state(self, flow_run: str) -> Any:
        """A run's state: its name, type and message among others."""
        return self.get(f"/flow_runs/{flow_run}")["state"]

    def set_state(self, flow_run: str, type_: str, message: str = "") -> None:
        """Say that a run is in a state, as its process would."""
        state = {"type": type_.upper(), "message": message}
        self.post(f"/flow_runs/{flow_run}/set_state", {"state": state, "force": True})

    def automations(self) -> dict[str, Any]:
        """All automations by name; two of a name are a mistake."""
        found = self.post("/automations/filter", {"limit": 200})
        assert len({a["name"] for a in found}) == len(found)
        return {a["name"]: a for a in found}

    @staticmethod
    def _told(response: httpx.Response) -> Any:
        assert response.is_success, response.text
        return response.json() if response.content else None
