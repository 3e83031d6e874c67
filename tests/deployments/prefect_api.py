"""Prefect's HTTP API, as its pages and other programs use it."""

from typing import Any
from uuid import UUID

import httpx


class PrefectApi:
    """The API of a server. What it refuses is an assertion that failed, unless it is asked for."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str) -> Any:
        """What is there."""
        return self._answer(self._client.get(path))

    def post(self, path: str, body: Any = None) -> Any:
        """What came of it."""
        return self._answer(self._client.post(path, json=body or {}))

    def patch(self, path: str, body: Any) -> None:
        """Change what is there."""
        self._answer(self._client.patch(path, json=body))

    def put(self, path: str, body: Any) -> None:
        """Replace what is there."""
        self._answer(self._client.put(path, json=body))

    def delete(self, path: str) -> None:
        """It is there no more."""
        self._answer(self._client.delete(path))

    def deployment(self, full_name: str) -> Any:
        """A deployment by flow/name."""
        return self.get(f"/deployments/name/{full_name}")

    def start(self, deployment: Any, **parameters: Any) -> httpx.Response:
        """Ask for a run, as the form's button does."""
        return self._client.post(
            f"/deployments/{deployment['id']}/create_flow_run", json={"parameters": parameters}
        )

    def state(self, flow_run: str | UUID) -> str:
        """A run's state by its name."""
        return self.get(f"/flow_runs/{flow_run}")["state"]["name"]

    def set_state(self, flow_run: str | UUID, type_: str) -> None:
        """Say that a run is in a state, as its process would."""
        self.post(
            f"/flow_runs/{flow_run}/set_state", {"state": {"type": type_.upper()}, "force": True}
        )

    def automations(self) -> dict[str, Any]:
        """All automations by name; two of a name are a mistake."""
        found = self.post("/automations/filter", {"limit": 200})
        assert len({a["name"] for a in found}) == len(found)
        return {a["name"]: a for a in found}

    @staticmethod
    def _answer(response: httpx.Response) -> Any:
        assert response.is_success, response.text
        return response.json() if response.content else None
