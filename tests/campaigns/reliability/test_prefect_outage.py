"""Prefect is away for minutes in mid-stage: training continues, once, and is reported afterwards.

The server is stopped where it stands (its connections hang), and is killed without a supervisor
that starts it again (they are refused). The figures are in docs/reliability.md.
"""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.end_to_end.small import SECONDS, newest_step, start_flow
from tests.support.campaigns import Campaign
from tests.support.deployments.prefect_api import unix, wait_until
from tests.support.infra.stack.live import LiveStack, kill

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(3600)]

STAGE = "pretrain"
SECONDS_AWAY = 150.0
MAX_PAUSE = 15.0  # seconds without a step
# More steps than the outage lasts: 2,000 of 4,096 tokens took less than 150 s.
SETTINGS: dict[str, Any] = {"pretrain__num_steps": 2000, "pretrain__total_batch_size": 16384}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path / "home", port=4720)
    stack.start()
    yield stack
    stack.end()


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_training_continues_while_prefect_is_away(
    way: str, stack: LiveStack, campaign: Campaign
) -> None:
    api, store = stack.api, stack.home / "stores" / way
    run = start_flow(stack, way, store=store, **SETTINGS)
    wait_until(lambda: newest_step(stack, STAGE) > 20, seconds=900, what="some steps")
    with away(stack, way):
        pause = longest_pause(stack)
        assert stack.processes("job")  # still in mid-stage
    back = time.time()
    wait_until(api.answers, seconds=300, what="the server to answer")
    wait_until(lambda: has_news(stack, back), seconds=180, what="news of the stage")
    campaign.found(f"at most {pause:.1f} s between steps, news {time.time() - back:.1f} s after")
    assert pause < MAX_PAUSE
    over = ("COMPLETED", "FAILED", "CANCELLED")  # one that crashed is to be resumed
    wait_until(lambda: api.run(run)["state_type"] in over, seconds=SECONDS, what="the run to end")
    ended = api.run(run)
    assert (ended["state_name"], ended["run_count"]) == ("Completed", 1), ended["state"]
    assert len(requests(stack)) == 1
    (manifest,) = (store / STAGE).glob("*/manifest.json")
    provenance = json.loads(manifest.read_text(encoding="utf-8"))["provenance"]
    assert len(provenance["segments"]) == 1  # executions


@contextlib.contextmanager
def away(stack: LiveStack, way: str) -> Iterator[None]:
    """Inside, no server answers. The supervisor is held still, for it would start another."""
    supervisors, servers = stack.processes("supervisor"), stack.processes("server")
    assert servers
    assert supervisors
    for process in (*supervisors, *servers):
        kill(process, signal.SIGSTOP)
    if way == "killed":
        for process in servers:
            kill(process)
    try:
        yield
    finally:
        for process in (*servers, *supervisors):
            kill(process, signal.SIGCONT)


def longest_pause(stack: LiveStack) -> float:
    """Return the longest time without a step, in seconds, in SECONDS_AWAY."""
    step, longest = newest_step(stack, STAGE), 0.0
    began = moved = time.monotonic()
    while (now := time.monotonic()) < began + SECONDS_AWAY:
        if (found := newest_step(stack, STAGE)) > step:
            step, longest, moved = found, max(longest, now - moved), now
        time.sleep(1.0)
    return max(longest, now - moved)


def has_news(stack: LiveStack, since: float) -> bool:
    """Return whether the stage has moved its bar, or ended, since the outage."""
    body = {"artifacts": {"type": {"any_": ["progress"]}}, "limit": 50}
    moments = [bar["updated"] for bar in stack.api.post("artifacts/filter", body)]
    moments += [run["end_time"] for run in requests(stack) if run["end_time"]]
    return any(unix(moment) > since for moment in moments)


def requests(stack: LiveStack) -> list[dict[str, Any]]:
    """Return the runs of one-stage that are for the stage, whatever became of them."""
    runs = stack.api.runs_of(stack.api.deployment("one-stage/gpu"))
    return [run for run in runs if run["parameters"]["request"]["stage"] == STAGE]
