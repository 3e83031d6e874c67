"""A supervisor's requests about runs and workers, to a server that answers as it is told."""

from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from infra.prefect.supervisor import runs

BEGAN = 1_800_000_000.0
SHOWN = "2027-01-15T08:00:00+00:00"  # the same


def test_after_an_outage_of_the_server_each_run_has_the_whole_time_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = [0.0]
    crashed: list[str] = []
    is_away = [False]
    running = {
        "id": "run",
        "name": "toy",
        "tags": [],
        "state_type": "RUNNING",
        "state": {"id": "1"},
    }

    def ask(api_url: str, path: str, *, body: Any = None, method: Any = None) -> Any:
        if is_away[0]:
            raise ConnectionRefusedError
        if path == "/flow_runs/filter":
            return [running] if "RUNNING" in body["flow_runs"]["state"]["type"]["any_"] else []
        return []

    monkeypatch.setattr(runs, "ask", ask)
    monkeypatch.setattr(runs, "set_state", lambda url, run, kind, why: bool(crashed.append(kind)))
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    watch = runs.RunWatch(lambda line: None)
    for second, away in ((0, False), (80, False), (85, True), (200, False), (285, False)):
        seconds[0], is_away[0] = second, away
        watch.poll("api")
        assert crashed == []
    seconds[0] = 291
    watch.poll("api")
    assert crashed == ["CRASHED"]


@pytest.mark.parametrize("pool", ["gpu", "gpu#1", "größe", "gpu?a"])
def test_a_worker_polls_a_pool_of_any_name(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(api_url: str, path: str, **options: Any) -> Any:
        assert path == f"/work_pools/{quote(pool)}/workers/filter"
        return [{"name": "here", "last_heartbeat_time": SHOWN}]

    monkeypatch.setattr(runs, "ask", ask)
    assert runs.is_polling("api", pool, "here", since=BEGAN - 1)
    assert not runs.is_polling("api", pool, "there", since=BEGAN - 1)
