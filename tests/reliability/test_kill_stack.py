"""kill -9 of a rank, a stage, a flow, a worker or the server of a deployed flow: it completes.

`make slow` runs a few; the figures of the last campaign are in docs/reliability.md. By hand, with
the number of kills and the seed of their moments:

    python -m tests.reliability.test_kill_stack --kills 100 --seed 1 --directory /tmp/kills

What was found so far is a line of JSON each in the directory's kills.jsonl, and
`--summary FILE [FILE]` makes the tables of it.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.prefect_api import wait_until
from tests.end_to_end.stack import Stack, kill, wait_until_gone
from tests.reliability.kill_stack import Campaign

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.prefect,
    pytest.mark.timeout(7200),
]

AUTO_RESUME = "auto-resume"  # part of the automation's name
PATIENCE = 300.0  # seconds for a server that is busy, or was killed
SECONDS_ALONE = 60.0  # a crashed run is resumed in less, if it is


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(home=tmp_path_factory.mktemp("kills") / "home", port=4710, patience=PATIENCE)
    stack.up()
    yield stack
    stack.end()


def test_a_deployed_flow_completes_whatever_is_killed(stack: Stack) -> None:
    made = campaign(stack, kills=10, seed=1)
    assert [flow.state for flow in made.flows] == ["Completed"] * len(made.flows)
    assert [flow.different for flow in made.flows] == [[]] * len(made.flows)
    assert [flow.orphans for flow in made.flows] == [[]] * len(made.flows)
    assert None not in [kill.seconds for kill in made.kills]


def test_without_the_automation_a_killed_flow_stays_crashed(stack: Stack) -> None:
    assert stays_crashed(stack) == "Crashed"


def campaign(stack: Stack, *, kills: int, seed: int) -> Campaign:
    """So many kills at the moments of a seed."""
    made = Campaign(stack=stack, moments=random.Random(seed), log=stack.home.parent / "kills.jsonl")
    made.run(kills)
    return made


def stays_crashed(stack: Stack) -> str:
    """State of a run a minute after its process was killed, nobody being there to resume it."""
    automations = stack.api.post("automations/filter", {})
    (resuming,) = [a for a in automations if AUTO_RESUME in a["name"]]
    place = f"automations/{resuming['id']}"
    answer = stack.api.send("PATCH", place, {"enabled": False})
    assert answer.is_success, answer.text
    try:
        run = Campaign(
            stack=stack, moments=random.Random(0), log=stack.home.parent / "control.jsonl"
        ).start(99)
        wait_until(lambda: stack.processes("job"), seconds=120, what="a job")
        kill(stack.engines(run)[0])
        wait_until(
            lambda: stack.api.run(run)["state_type"] == "CRASHED", seconds=180, what="Crashed"
        )
        time.sleep(SECONDS_ALONE)
        return stack.api.run(run)["state_name"]
    finally:
        stack.api.send("PATCH", place, {"enabled": True})


def summary(lines: Sequence[dict[str, Any]]) -> str:
    """Tables of kills by victim, and of flows."""
    kills = [line for line in lines if line["what"] == "Kill"]
    flows = [line for line in lines if line["what"] == "Flow"]
    disturbed = [flow for flow in flows if flow["kills"]]
    rows = [
        f"{len(kills)} kills in {len(disturbed)} flows: "
        f"{sum(f['state'] == 'Completed' for f in disturbed)} completed, "
        f"{sum(bool(f['different']) for f in flows)} with other artifacts, "
        f"{sum(len(f['orphans']) for f in flows)} processes left",
        "",
        "| victim | kills | moving again after: median | longest | never | server back |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for victim in sorted({k["victim"] for k in kills}):
        found = [k for k in kills if k["victim"] == victim]
        seconds = [k["seconds"] for k in found if k["seconds"] is not None]
        server = [k["server"] for k in found if k["server"] is not None]
        rows.append(
            f"| {victim} | {len(found)} | {statistics.median(seconds or [0]):.1f} s | "
            f"{max(seconds, default=0):.1f} s | {len(found) - len(seconds)} | "
            f"{f'{statistics.median(server):.1f} s' if server else ''} |"
        )
    rows += ["", "| flow | kills | state | attempts | seconds | different | left |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    rows += [
        f"| {f['number']} | {f['kills']} | {f['state']} {f['message'][:80]} | {f['run_count']} | "
        f"{f['seconds']:.0f} | {', '.join(f['different']) or 0} | {len(f['orphans'])} |"
        for f in flows
    ]
    return "\n".join(rows)


def read_lines(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Findings of all campaigns."""
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main() -> None:
    """One campaign by hand, or the tables of some."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability.test_kill_stack", description=__doc__
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port", type=int, default=4710)
    parser.add_argument("--directory", type=Path, help="a new one; default a passing one")
    parser.add_argument("--control", action="store_true", help="only: is a control noticed?")
    parser.add_argument("--summary", type=Path, nargs="+", help="only: tables of these findings")
    given = parser.parse_args()
    if given.summary:
        sys.stdout.write(f"{summary(read_lines(given.summary))}\n")
        return
    with tempfile.TemporaryDirectory() as passing:
        directory = given.directory or Path(passing)
        directory.mkdir(parents=True, exist_ok=True)
        stack = Stack(home=directory / "home", port=given.port, patience=PATIENCE)
        try:
            stack.up()
            if given.control:
                sys.stdout.write(f"without the automation: {stays_crashed(stack)}\n")
                return
            campaign(stack, kills=given.kills, seed=given.seed)
            sys.stdout.write(f"{summary(read_lines([directory / 'kills.jsonl']))}\n")
            stack.down()
            sys.stdout.write(f"left after `down`: {wait_until_gone(stack, seconds=15)}\n")
        finally:
            stack.end()


if __name__ == "__main__":
    main()
