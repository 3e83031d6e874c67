"""Prefect is away for minutes in mid-stage: training continues, once, and is reported afterwards.

The server is stopped where it stands (its connections hang), and is killed without a supervisor
that starts it again (they are refused). The figures are in docs/reliability.md.
"""

import contextlib
import itertools
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from tests.campaigns.end_to_end.small import form_values
from tests.campaigns.end_to_end.walk import newest_step
from tests.support.campaigns import Campaign
from tests.support.deployments.prefect_api import unix, wait_until
from tests.support.infra.stack.live import LiveStack, kill

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(3600)]

Way = Literal["stopped", "killed"]
STAGE = "pretrain"
SECONDS_AWAY = 150.0
STEPS = 2000  # of pretraining: more than the outage lasts
BATCH = 4096  # tokens a step: of four times as many small ones the loss explodes at last
_SAMPLE = 5.0  # seconds between two looks at the steps


@dataclass(frozen=True, kw_only=True)
class Outage:
    """What a run did while Prefect was away, and afterwards."""

    way: Way
    seconds: float
    steps: tuple[int, ...]  # when the outage began, then every few seconds until it ended
    standstill: float  # the longest time in it without a step
    in_mid_stage: bool  # whether the stage still ran when Prefect was back
    back: float  # seconds until the server answered
    told: float | None  # until Prefect heard from the stage again, which ended or moved its bar
    state: str  # of the run in the end
    message: str
    run_count: int
    orders: int  # runs of one-stage that were made for the stage
    executions: int  # of the stage's job


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path / "home", port=4720)
    stack.start()
    yield stack
    stack.end()


@pytest.mark.parametrize("way", get_args(Way))
def test_training_continues_while_prefect_is_away(
    way: Way, stack: LiveStack, campaign: Campaign
) -> None:
    found = outage(stack, way)
    campaign.found(
        f"{found.state}, at most {found.standstill} s between steps, told {found.told} s after"
    )
    assert found.in_mid_stage
    assert found.steps[-1] > found.steps[0]
    assert found.standstill < 3 * _SAMPLE
    assert found.state == "Completed", found.message
    assert found.told is not None
    assert (found.run_count, found.orders, found.executions) == (1, 1, 1)


def outage(
    stack: LiveStack, way: Way, *, seconds: float = SECONDS_AWAY, steps: int = STEPS
) -> Outage:
    """A run from the form to its end, with Prefect away while it pretrains."""
    api, store = stack.api, stack.home / "stores" / way
    store.mkdir(parents=True, exist_ok=True)
    settings = {"pretrain__num_steps": steps, "pretrain__total_batch_size": BATCH}
    values = form_values(run_name=way, store=store.as_uri(), **settings)
    run = api.trigger(api.deployment("nanochat/nanochat"), values)
    wait_until(lambda: last_step(stack) > 20, seconds=900, what="some steps")
    with away(stack, way):
        seen = watch_steps(stack, seconds)
        in_mid_stage = bool(stack.processes("job"))
    began = time.time()
    wait_until(api.answers, seconds=300, what="the server to answer")
    back = time.time() - began
    told = _seconds_until_told(stack, began)
    state = _end_of(stack, run)
    return Outage(
        way=way,
        seconds=seconds,
        steps=tuple(step for _, step in seen),
        standstill=round(_standstill(seen), 1),
        in_mid_stage=in_mid_stage,
        back=round(back, 1),
        told=told,
        state=state["state_name"],
        message=state["state"]["message"] or "",
        run_count=state["run_count"],
        orders=len(_orders(stack)),
        executions=_executions(store),
    )


@contextlib.contextmanager
def away(stack: LiveStack, way: Way) -> Iterator[None]:
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


def watch_steps(stack: LiveStack, seconds: float) -> list[tuple[float, int]]:
    """When, and the last step then."""
    seen: list[tuple[float, int]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen.append((time.monotonic(), last_step(stack)))
        time.sleep(_SAMPLE)
    return [*seen, (time.monotonic(), last_step(stack))]


def last_step(stack: LiveStack) -> int:
    """Of the unfinished job; once it has ended, no number is larger."""
    with contextlib.suppress(OSError):
        return newest_step(stack, STAGE) or 0
    return 0


def _standstill(seen: list[tuple[float, int]]) -> float:
    moved = [seen[0][0]]
    for (_, before), (moment, after) in itertools.pairwise(seen):
        if after > before:
            moved.append(moment)
    moved.append(seen[-1][0])
    return max(later - earlier for earlier, later in itertools.pairwise(moved))


def _seconds_until_told(stack: LiveStack, since: float) -> float | None:
    """Until something of the stage's progress, or its end, is newer than the outage."""

    def is_told() -> bool:
        body = {"artifacts": {"type": {"any_": ["progress"]}}, "limit": 50}
        bars = stack.api.post("artifacts/filter", body)
        moments = [bar["updated"] for bar in bars]
        moments += [r["end_time"] for r in _orders(stack) if r["end_time"]]
        return any(unix(moment) > since for moment in moments)

    with contextlib.suppress(AssertionError):
        wait_until(is_told, seconds=180, what="news of the stage")
        return round(time.time() - since, 1)
    return None


def _orders(stack: LiveStack) -> list[dict[str, Any]]:
    """Runs of one-stage that are for the stage, whatever became of them."""
    runs = stack.api.runs_of(stack.api.deployment("one-stage/gpu"))
    return [run for run in runs if run["parameters"]["stage"] == STAGE]


def _end_of(stack: LiveStack, run: str) -> dict[str, Any]:
    """The run when it is over; one that crashed is waited for, since it is to be resumed."""
    wait_until(
        lambda: stack.api.run(run)["state_type"] in ("COMPLETED", "FAILED", "CANCELLED"),
        seconds=1500,
        what="the run to end",
    )
    return stack.api.run(run)


def _executions(store: Path) -> int:
    """How often the job of the stage was started, by its artifact; 0 without one."""
    manifests = list((store / STAGE).glob("*/manifest.json"))
    if not manifests:
        return 0
    (manifest,) = manifests
    return len(json.loads(manifest.read_text(encoding="utf-8"))["provenance"]["segments"])
