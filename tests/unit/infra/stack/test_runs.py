"""A supervisor reports the runs that it lost, and no others."""

import contextlib
from email.message import Message
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from infra.prefect.supervisor import runs

BEGAN = 1_800_000_000.0
SHOWN = "2027-01-15T08:00:00+00:00"  # the same


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """States that a server with one running run is told; the run takes them."""
    told: list[dict[str, Any]] = []
    state: dict[str, Any] = {"type": "RUNNING", "timestamp": SHOWN}

    def ask(api_url: str, path: str, *, body: Any = None) -> Any:
        if body is not None:
            told.append(body["state"])
            state.update(body["state"])
        return {"state": dict(state), "tags": [runs.AUTO_RESUME]}

    monkeypatch.setattr(runs, "ask", ask)
    return told


def test_a_run_whose_process_is_gone_is_crashed(told: list[dict[str, Any]]) -> None:
    assert runs.report_lost("api", "run", "gone", until=BEGAN + 5, resume=False)
    assert [state["type"] for state in told] == ["CRASHED"]


def test_when_the_stack_stops_it_waits_for_the_next_worker(told: list[dict[str, Any]]) -> None:
    assert runs.report_lost("api", "run", "stopped", until=BEGAN + 5, resume=True)
    assert [state["type"] for state in told] == ["CRASHED", "SCHEDULED"]


def test_a_run_that_went_on_elsewhere_is_left_alone(told: list[dict[str, Any]]) -> None:
    assert not runs.report_lost("api", "run", "gone", until=BEGAN - 5, resume=True)
    assert told == []


@pytest.mark.parametrize(("code", "is_repeated"), [(404, False), (429, True), (503, True)])
def test_a_report_that_a_busy_server_refuses_is_repeated(
    code: int, monkeypatch: pytest.MonkeyPatch, *, is_repeated: bool
) -> None:
    def ask(*_: object, **__: object) -> Any:
        raise HTTPError("api", code, "", Message(), None)

    monkeypatch.setattr(runs, "ask", ask)
    with pytest.raises(HTTPError) if is_repeated else contextlib.nullcontext():
        runs.report_lost("api", "run", "gone", until=BEGAN + 5, resume=False)


@pytest.mark.parametrize("pool", ["gpu", "gpu#1", "größe", "gpu?a"])
def test_a_worker_polls_a_pool_of_any_name(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(api_url: str, path: str, **options: Any) -> Any:
        assert path == f"/work_pools/{quote(pool)}/workers/filter"
        return [{"name": "here", "last_heartbeat_time": SHOWN}]

    monkeypatch.setattr(runs, "ask", ask)
    assert runs.is_polling("api", pool, "here", since=BEGAN - 1)
    assert not runs.is_polling("api", pool, "there", since=BEGAN - 1)
