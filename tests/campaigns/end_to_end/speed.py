"""How long a deployed run takes to get going, and how long one takes that has nothing to do.

    python -m tests.campaigns.end_to_end.speed --repeats 5

Both begin with the run's state RUNNING, as its page shows it: the worker has taken it before. The
first ends when the first stage's job starts, the second with COMPLETED.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.campaigns.end_to_end.small import form_values
from tests.campaigns.end_to_end.walk import SECONDS_FOR_A_FLOW, stages_of
from tests.support.deployments.prefect_api import unix, wait_until
from tests.support.infra.stack.live import LiveStack

TARGETS = {"first job": 2.0, "all cached": 5.0}


def measure_first_job(stack: LiveStack, number: int) -> float:
    """Seconds from RUNNING to the first job of a run whose store is empty; it is then cancelled."""
    api, store = stack.api, stack.home / "stores" / f"speed-{number}"
    store.mkdir(parents=True)
    values = form_values(run_name=f"speed-{number}", store=store.as_uri())
    run = api.trigger(api.deployment("nanochat/nanochat"), values)
    began = unix(
        wait_until(lambda: api.run(run)["start_time"], seconds=120, what="the run to begin")
    )
    started = wait_until(lambda: _first_start(stack, began), seconds=120, what="a job")
    api.press_cancel(run)
    api.wait_for_end(run, seconds=120)
    return started - began


def _first_start(stack: LiveStack, since: float) -> float | None:
    """When the first job after `since` was started, as its execution's record says."""
    starts: list[float] = []
    for record in (stack.home / "work").glob("*/*/segments.jsonl"):
        starts += [json.loads(line)["started"] for line in record.read_text().splitlines()]
    return min((s for s in starts if s > since), default=None)


def build_all(stack: LiveStack) -> None:
    """A run of every stage, so that later ones have nothing to do."""
    run = stack.api.trigger(stack.api.deployment("nanochat/nanochat"), _all(stack))
    ended = stack.api.wait_for_end(run, seconds=SECONDS_FOR_A_FLOW)
    assert ended["state_type"] == "COMPLETED", ended["state"]


def measure_all_cached(stack: LiveStack) -> float:
    """Seconds from RUNNING to COMPLETED of a run all of whose stages are there."""
    run = stack.api.trigger(stack.api.deployment("nanochat/nanochat"), _all(stack))
    ended = stack.api.wait_for_end(run, seconds=SECONDS_FOR_A_FLOW)
    # The server learns of task runs by events, a moment after the run itself.
    wait_until(
        lambda: set(stages_of(stack, run).values()) == {"Cached"},
        seconds=30,
        what="every stage to be Cached",
    )
    return unix(ended["end_time"]) - unix(ended["start_time"])


def _all(stack: LiveStack) -> dict[str, object]:
    store = stack.home / "stores" / "speed"
    store.mkdir(parents=True, exist_ok=True)
    return form_values(run_name="speed", store=store.as_uri())


def main() -> None:
    """A table of both."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.end_to_end.speed", description=__doc__
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=4740)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        stack = LiveStack(Path(directory) / "home", port=given.port)
        try:
            stack.start()
            first = [measure_first_job(stack, number) for number in range(given.repeats)]
            build_all(stack)
            cached = [measure_all_cached(stack) for _ in range(given.repeats)]
        finally:
            stack.end()
    for (what, target), found in zip(TARGETS.items(), (first, cached), strict=True):
        seconds = ", ".join(f"{value:.2f}" for value in found)
        middle = statistics.median(found)
        sys.stdout.write(f"{what}: median {middle:.2f} s (target {target:g}): {seconds}\n")
    sys.stdout.write(f"load of the machine afterwards: {os.getloadavg()}\n")


if __name__ == "__main__":
    main()
