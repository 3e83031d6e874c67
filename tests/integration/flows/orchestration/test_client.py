"""The client that asks once: what it raises, how soon, and what it reports of a refusal."""

import socket
from typing import Any

import httpx
import pytest
from prefect.context import SyncClientContext
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.orchestration import client as module
from flows.orchestration.client import quick_client, reporting_refusals
from nanochat_core.errors import ConfigError

pytestmark = pytest.mark.prefect


def ask(api_url: str) -> Any:
    """One request to another server."""
    settings: Any = {PREFECT_API_URL: api_url, PREFECT_CLIENT_MAX_RETRIES: 8}
    with temporary_settings(settings), quick_client() as client:
        return client.read_flow_runs(limit=1)


@pytest.mark.parametrize(("listens", "error"), [(False, "ConnectError"), (True, "ReadTimeout")])
def test_a_server_that_does_not_answer_is_reported_after_one_try(
    server, monkeypatch, listens, error
):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.5)
    with socket.socket() as still, SyncClientContext.get_or_create() as context:
        still.bind(("127.0.0.1", 0))
        if listens:
            still.listen()
        context.client.read_flow_runs(limit=1)  # connected once, it would ask again for minutes
        with pytest.raises(getattr(httpx, error)):
            ask(f"http://127.0.0.1:{still.getsockname()[1]}/api")


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        *((401, "PREFECT_API_AUTH_STRING"), (409, "up --register"), (422, "--register")),
        *((429, None), (500, None), (503, None)),  # overloaded: the server does not refuse
    ],
)
def test_a_refusal_is_a_persons_to_mend(status, hint):
    request = httpx.Request("POST", "http://server/api")
    answer = httpx.Response(status, request=request, json={"detail": "no such\nfield"})
    with pytest.raises((ConfigError, httpx.HTTPStatusError)) as caught, reporting_refusals():
        answer.raise_for_status()
    if hint is None:
        assert not isinstance(caught.value, ConfigError)
    else:
        assert str(caught.value) == f"Prefect refuses ({status}): no such field"
        assert hint in (caught.value.hint or "")
