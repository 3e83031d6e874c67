"""Cancel submitted runs at random moments: each ends as Cancelled and no supervisor resumes it.

The figures are in docs/reliability.md. NANOCHAT_TRIALS is the number of cancelled runs.
"""

import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from infra.polling import SLOW_SECONDS
from infra.prefect.supervisor.runs import SETTLED_SECONDS
from infra.prefect.supervisor.workers import SILENT_SECONDS
from tests.campaigns.end_to_end.small import start_flow
from tests.campaigns.infra.stack.test_resumed_once import start_again
from tests.support.campaigns import Campaign
from tests.support.deployments.prefect_api import FINAL, wait_until
from tests.support.infra.stack.live import LiveStack

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

AT_ONCE = 8  # runs: a worker of `cpu` takes six, and others wait for it
BEFORE_GPU = ("shards", "task_data", "tokenizer", "tokens", "rows")
# By the rest of a run's number divided by three: the stages that it finds in its store.
FOUND = ((), BEFORE_GPU, ("shards", "task_data"))
# Seconds from Cancel to the end of the run. Prefect ends one that does not begin after 300.
LIMIT = 480.0
# A dead run is silent for so long before a supervisor resumes it; twice, for two polls and more.
QUIET_SECONDS = 2 * (SILENT_SECONDS + SETTLED_SECONDS + 2 * SLOW_SECONDS)


@dataclass
class Cancelled:
    """A run that was cancelled, and what was seen of it."""

    run: str
    during: str  # its state when it was cancelled, and the stages whose jobs were running
    at: float = field(default_factory=time.monotonic)
    seconds: float | None = None  # until its state was final and it had no process


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path_factory.mktemp("cancels") / "home", port=4730, patience=300.0)
    try:
        start_again(stack)
        yield stack
    finally:
        stack.end()


def test_a_cancelled_run_stays_cancelled(stack: LiveStack, campaign: Campaign) -> None:
    made = cancel_runs(stack, cancels=campaign.trials(10), seed=campaign.seed)
    time.sleep(QUIET_SECONDS)

    wrong = [fault for each in made for fault in faults(stack, each)]
    left = [p.cmdline() for p in stack.processes("job", "agent", "flow")]
    during = Counter(each.during for each in made)
    longest = max(each.seconds or 0.0 for each in made)
    campaign.found(f"{len(made)} cancelled, the longest took {longest:.0f} s: {dict(during)}")
    print(*(f"{number} {state}" for state, number in during.most_common()), sep="\n")
    assert wrong == []
    assert left == []
    # Only attempts that a person's Cancel ended: no run of a request survives its caller.
    assert [run["name"] for run in stack.api.runs() if run["state_type"] not in FINAL] == []


def cancel_runs(stack: LiveStack, *, cancels: int, seed: int) -> list[Cancelled]:
    """Cancel so many runs, `AT_ONCE` at a time, each after a random time."""
    moments, number = random.Random(seed), 0
    longest = build_first(stack)
    waiting: dict[str, float] = {}  # run -> when to cancel it
    made: list[Cancelled] = []
    while len(made) < cancels or any(each.seconds is None for each in made):
        while len(waiting) < AT_ONCE and len(made) + len(waiting) < cancels:
            number += 1
            # Every second one only once it is Running: on a quiet machine most have no process yet.
            early = time.monotonic() + moments.uniform(0.0, longest)
            waiting[start(stack, number)] = early if number % 2 else math.inf
        for run in [run for run, moment in waiting.items() if moment == math.inf]:
            if stack.api.run(run)["state_type"] in ("RUNNING", *FINAL):
                waiting[run] = time.monotonic() + moments.uniform(0.0, longest)
        for run in [run for run, moment in waiting.items() if moment <= time.monotonic()]:
            del waiting[run]
            if (during := describe(stack, run)) is None:
                continue  # it was over
            stack.api.press_cancel(run)
            made.append(Cancelled(run, during))
            print(f"{time.strftime('%X')} cancelled {len(made)}: {during}", flush=True)
        for each in made:
            if each.seconds is None and has_ended(stack, each.run):
                each.seconds = time.monotonic() - each.at
            late = each.seconds is None and time.monotonic() - each.at > LIMIT
            assert not late, f"{each}: {stack.api.states(each.run)}"
        time.sleep(0.5)
    return made


def build_first(stack: LiveStack) -> float:
    """Have a run build the stages of BEFORE_GPU; return seconds from its start to a GPU stage."""
    began, run = time.monotonic(), start(stack, 0)
    wait_until(
        lambda: any(stack.home.glob("stores/0/rows/*/manifest.json")), seconds=1800, what="rows"
    )
    seconds = time.monotonic() - began
    stack.api.press_cancel(run)
    wait_until(lambda: has_ended(stack, run), seconds=LIMIT, what="its end")
    return seconds


def start(stack: LiveStack, number: int) -> str:
    """Submit a run with a store of its own; return its id."""
    store = stack.home / "stores" / str(number)
    for stage in FOUND[number % 3]:
        shutil.copytree(stack.home / "stores" / "0" / stage, store / stage)
    # Another fingerprint in each run: two runs of one home do not build the same one at once.
    name = ("tokenizer__max_chars", "pretrain__num_steps")[number % 3 == 1]
    settings: dict[str, Any] = {name: (500_000, 40)[number % 3 == 1] + number}
    return start_flow(stack, f"cancels-{number}", store=store, **settings)


def requests_of(stack: LiveStack, name: str) -> list[dict[str, Any]]:
    """Return the runs of the stages that a run requested from the pool `gpu`."""
    return stack.api.runs(flow_runs={"tags": {"all_": [f"run:{name}"]}})


def describe(stack: LiveStack, run: str) -> str | None:
    """Return the state of a run, and what it builds; None if it is over."""
    if (found := stack.api.run(run))["state_type"] in FINAL:
        return None
    requests = requests_of(stack, found["name"])
    if live := [each for each in requests if each["state_type"] not in FINAL]:
        stage = live[0]["name"].partition("/")[0]
        return f"{found['state_name']}, {stage} {live[0]['state_name']} on gpu"
    parts = len(list((stack.home / "stores" / found["name"].rpartition("-")[2]).glob("*/*")))
    return f"{found['state_name']}, {parts} stages begun" if stack.engines(run) else "no process"


def has_ended(stack: LiveStack, run: str) -> bool:
    """Return whether the states of the run and its requests are final, and no process is left."""
    own = stack.api.run(run)
    found = [own, *requests_of(stack, own["name"])]
    return all(e["state_type"] in FINAL and not stack.engines(e["id"]) for e in found)


def faults(stack: LiveStack, made: Cancelled) -> list[str]:
    """Return what is wrong with a run long after it was cancelled."""
    history = [each["type"] for each in stack.api.states(made.run)]
    cancelled_at = next(i for i, each in enumerate(history) if each.startswith("CANCELL"))
    after = history[cancelled_at:]
    found = [] if history[-1] == "CANCELLED" else [f"its last state is {history[-1]}"]
    found += ["it was started again"] if {"SCHEDULED", "PENDING", "RUNNING"} & {*after} else []
    return [f"{made.run}, {made.during}: {fault}: {history}" for fault in found]
