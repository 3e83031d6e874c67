"""SIGKILL of any process of a stack on which several runs are: each resumes once, and ends equal.

The runs go through every stage. The figures are in docs/reliability.md. NANOCHAT_TRIALS is the
number of kills. test_mending.py measures how long a run takes to resume.
"""

import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest

from flows.stages import STAGES
from tests.campaigns.end_to_end.small import PLACE, start_flow
from tests.support.campaigns import Campaign
from tests.support.deployments.prefect_api import wait_until
from tests.support.infra.stack.live import LiveStack, environment_of, kill

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

Victim = Literal["job", "stage", "flow", "worker cpu", "worker gpu", "server", "supervisor"]
WEIGHTS: dict[Victim, int] = {
    "job": 12,
    "stage": 10,
    "flow": 14,
    "server": 5,
    "worker cpu": 3,
    "worker gpu": 3,
    "supervisor": 3,
}
AT_ONCE = 3  # runs
PAUSE = (2.0, 12.0)  # seconds between two kills
SECONDS = 900.0  # for a run to get a process again, or to end, on a busy machine
FOUND = ("shards", "task_data", "tokenizer", "tokens", "rows")  # of the undisturbed run
CLOCKS = "report"  # which says how long things took
ENDED = ("COMPLETED", "FAILED", "CANCELLED")  # a crashed run is resumed


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path_factory.mktemp("once") / "home", port=4750, patience=300.0)
    try:
        start_again(stack)
        yield stack
    finally:
        stack.end()


def test_each_killed_run_has_one_live_attempt_and_ends_equal(
    stack: LiveStack, campaign: Campaign
) -> None:
    first = start(stack, 0)
    wait_until(lambda: is_over(stack, first), seconds=2 * SECONDS, what="the undisturbed run")
    expected = digests(stack.home / "stores" / "0")
    assert {*expected} == {stage.name for stage in STAGES} - {CLOCKS}

    with noting_twins(stack) as twins:
        kills, runs = kill_processes(stack, kills=campaign.trials(12), seed=campaign.seed)
    faults = twins + [fault for number, run in runs.items() for fault in look(stack, number, run)]
    different = {n: digests(stack.home / "stores" / str(n)) for n in runs}
    left = wait_for_no_process(stack)

    victims = Counter(kills)
    print(*(f"| {victim} | {number} |" for victim, number in victims.items()), sep="\n")
    campaign.found(f"{len(kills)} kills in {len(runs)} runs, {len(faults)} faults: {dict(victims)}")
    assert faults == []
    assert {n for n, found in different.items() if found != expected} == set()
    assert left == []


def start(stack: LiveStack, number: int) -> str:
    """Submit a run with a store of its own; all but the first find what a CPU makes in it."""
    store = stack.home / "stores" / str(number)
    if number:
        for stage in FOUND:
            shutil.copytree(stack.home / "stores" / "0" / stage, store / stage)
    fields = {"retries": 50, "place": [*PLACE, "save_every_seconds=2"]}
    return start_flow(stack, f"once-{number}", store=store, fields=fields)


def is_over(stack: LiveStack, run: str) -> bool:
    return stack.api.run(run)["state_type"] in ENDED


def kill_processes(
    stack: LiveStack, *, kills: int, seed: int
) -> tuple[list[Victim], dict[int, str]]:
    """Kill so many processes; return them, and the runs by their number, which all have ended."""
    moments = random.Random(seed)
    made: list[Victim] = []
    runs: dict[int, str] = {}
    while True:
        live = [run for run in runs.values() if not is_over(stack, run)]
        if len(made) >= kills:
            break
        while len(live) < AT_ONCE:
            number = len(runs) + 1
            runs[number] = start(stack, number)
            live.append(runs[number])
        time.sleep(moments.uniform(*PAUSE))
        victim = moments.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kill_one(stack, victim, live, moments):
            made.append(victim)
            print(f"{time.strftime('%X')} killed {victim}: {len(made)}", flush=True)
    for run in live:
        wait_until(lambda run=run: is_over(stack, run), seconds=SECONDS, what=f"{run} to end")
    return made, runs


def kill_one(stack: LiveStack, victim: Victim, live: list[str], moments: random.Random) -> bool:
    """Kill a process of that kind if there is one; wait until what others need is back."""
    engines = [engine for run in live for engine in stack.engines(run)]
    flows = stack.processes("flow")
    find: dict[Victim, Callable[[], list[psutil.Process]]] = {
        "job": lambda: stack.processes("job"),
        "stage": lambda: [p for p in flows if p not in engines],
        "flow": lambda: engines,
        "worker cpu": lambda: stack.workers_of("cpu"),
        "worker gpu": lambda: stack.workers_of("gpu"),
        "server": lambda: stack.processes("server"),
        "supervisor": lambda: stack.processes("supervisor"),
    }
    found = find[victim]()
    if not found or not kill(moments.choice(found)):
        return False
    if victim == "supervisor":
        start_again(stack)
    if victim == "server":
        wait_until(stack.api.answers, seconds=SECONDS, what="the server")
    if victim in ("worker cpu", "supervisor"):  # all runs ended with it

        def is_back(run: str) -> bool:
            return is_over(stack, run) or bool(stack.engines(run))

        time.sleep(20.0)  # in which those that save end
        wait_until(lambda: all(map(is_back, live)), seconds=SECONDS, what="all runs to resume")
    return True


def start_again(stack: LiveStack) -> None:
    """Give `nanochat up`; twice on a busy machine, as a home's first start makes its database."""
    try:
        stack.start()
    except AssertionError:
        stack.start()


@contextmanager
def noting_twins(stack: LiveStack) -> Generator[list[str]]:
    """Note each flow run that has two live processes for longer than the first needs to exit."""
    found: list[str] = []
    over = threading.Event()

    def watch() -> None:
        since: dict[str, float] = {}
        while not over.wait(1.0):
            running = Counter(
                environment_of(p).get("PREFECT__FLOW_RUN_ID") for p in stack.processes("flow")
            )
            twins = [run for run, number in running.items() if run and number > 1]
            since = {run: since.get(run, time.monotonic()) for run in twins}
            for run, began in since.items():
                if time.monotonic() - began > 5.0 and not any(run in each for each in found):
                    found.append(f"{run} has {running[run]} processes at {time.strftime('%X')}")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def look(stack: LiveStack, number: int, run: str) -> list[str]:
    """Return what is wrong with a run that has ended."""
    states = stack.api.states(run)
    types = [each["type"] for each in states]
    resumes = [i for i, each in enumerate(states) if each["name"] == "AwaitingRetry"]
    faults = [] if types[-1] == "COMPLETED" else [f"it ended as {types[-1]}"]
    faults += ["it was resumed without a crash" for i in resumes if types[i - 1] != "CRASHED"]
    if types.count("RUNNING") > 1 + len(resumes):
        faults.append("it was started more often than it was resumed")
    return [f"run {number} {run}: {fault}: {types}" for fault in faults]


def wait_for_no_process(stack: LiveStack) -> list[list[str]]:
    """Return the command lines of jobs and flows that outlive all runs."""
    deadline = time.monotonic() + 60.0
    while (left := stack.processes("job", "agent", "flow")) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [process.cmdline() for process in left]


def digests(store: Path) -> dict[str, str]:
    """Return the digest of the only artifact of each stage, by stage."""
    found: dict[str, str] = {}
    for path in sorted(store.glob("*/*/manifest.json")):
        stage = path.parts[-3]
        assert stage not in found, f"two artifacts of {stage}"
        if stage != CLOCKS:
            found[stage] = json.loads(path.read_text(encoding="utf-8"))["digest"]
    return found
