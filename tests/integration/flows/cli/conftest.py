"""Fixtures of the tests of commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.retry import RetryPolicy
from infra.storage.base import Store
from tests.support.flows.prefect_api import Api
from tests.support.serving import serving


@pytest.fixture
def api_url(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The API of a small Prefect server, which is the one to use."""
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    for name in ("created", "live", "lives", "faults", "set_states"):
        monkeypatch.setattr(Api, name, [])
    monkeypatch.setattr(Api, "refuses", None)
    monkeypatch.setattr("infra.prefect.flow_runs._SUBMISSION", RetryPolicy(tries=3, first_wait=0))
    monkeypatch.setattr("infra.prefect.flow_runs._unanswered", {})
    with serving(Api) as port:
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
        yield f"http://127.0.0.1:{port}/api"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random chat model."""
    from tests.support.flows.chat_model import write_chat_model  # loads torch

    write_chat_model(directory := tmp_path_factory.mktemp("model"))
    return directory
