"""kill -9 of a rank, a stage, a flow, a worker or the server of a deployed flow: it completes.

The figures of the last campaign are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.support.campaigns import Campaign
from tests.support.deployments.prefect_api import wait_until
from tests.support.infra.stack.live import LiveStack, kill
from tests.support.reliability.kill_stack import Flow, Kill, Kills

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

PATIENCE = 300.0  # seconds for a server that is busy, or was killed
SECONDS_ALONE = 60.0  # a crashed run is resumed in less, if it is


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    stack = LiveStack(tmp_path_factory.mktemp("kills") / "home", port=4710, patience=PATIENCE)
    stack.start()
    yield stack
    stack.end()


def test_a_deployed_flow_completes_whatever_is_killed(stack: LiveStack, campaign: Campaign) -> None:
    made = kill_processes(stack, kills=campaign.trials(4), seed=campaign.seed)
    tables = summary(made.kills, made.flows)
    print(tables)
    campaign.found(tables.partition("\n")[0])
    assert [flow.state for flow in made.flows] == ["Completed"] * len(made.flows)
    assert [flow.different for flow in made.flows] == [[]] * len(made.flows)
    assert [flow.orphans for flow in made.flows] == [[]] * len(made.flows)
    assert None not in [kill.seconds for kill in made.kills]


def test_without_its_tag_a_killed_flow_stays_crashed(stack: LiveStack) -> None:
    assert stays_crashed(stack) == "Crashed"


def kill_processes(stack: LiveStack, *, kills: int, seed: int) -> Kills:
    """So many kills at the moments of a seed."""
    made = Kills(stack=stack, moments=random.Random(seed))
    made.run(kills)
    return made


def stays_crashed(stack: LiveStack) -> str:
    """State of a run a minute after its process was killed, without the tag that resumes it."""
    run = Kills(stack=stack, moments=random.Random(0)).start(99)
    wait_until(lambda: stack.processes("job"), seconds=120, what="a job")
    answer = stack.api.send("PATCH", f"flow_runs/{run}", {"tags": []})
    assert answer.is_success, answer.text
    kill(stack.engines(run)[0])
    wait_until(lambda: stack.api.run(run)["state_type"] == "CRASHED", seconds=180, what="Crashed")
    time.sleep(SECONDS_ALONE)
    return stack.api.run(run)["state_name"]


def summary(kills: Sequence[Kill], flows: Sequence[Flow]) -> str:
    """Tables of kills by victim, and of flows."""
    disturbed = [flow for flow in flows if flow.kills]
    rows = [
        f"{len(kills)} kills in {len(disturbed)} flows: "
        f"{sum(f.state == 'Completed' for f in disturbed)} completed, "
        f"{sum(bool(f.different) for f in flows)} with other artifacts, "
        f"{sum(len(f.orphans) for f in flows)} processes left",
        "",
        "| victim | kills | moving again after: median | longest | never | server back |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for victim in sorted({k.victim for k in kills}):
        found = [k for k in kills if k.victim == victim]
        seconds = [k.seconds for k in found if k.seconds is not None]
        server = [k.server for k in found if k.server is not None]
        rows.append(
            f"| {victim} | {len(found)} | {statistics.median(seconds or [0]):.1f} s | "
            f"{max(seconds, default=0):.1f} s | {len(found) - len(seconds)} | "
            f"{f'{statistics.median(server):.1f} s' if server else ''} |"
        )
    rows += ["", "| flow | kills | state | attempts | seconds | different | left |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    rows += [
        f"| {f.number} | {f.kills} | {f.state} {f.message[:80]} | {f.run_count} | "
        f"{f.seconds:.0f} | {', '.join(f.different) or 0} | {len(f.orphans)} |"
        for f in flows
    ]
    return "\n".join(rows)
