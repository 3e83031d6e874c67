"""kill -9 of a run and all that it started, again and again: it ends as one left alone.

The figures are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills. Of a sweep `make
test` has flows/sweep/test_flow.py, whose toy stages are killed.
"""

import random
from pathlib import Path

import pytest

from tests.campaigns.end_to_end.small import DEPTH, SETTINGS
from tests.support.campaigns import Campaign
from tests.support.reliability.kills import Home, processes_of, values_in

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

LONG = {**SETTINGS, "pretrain.num_steps": 600, "rl.num_steps": 20}
# Two threads once gave other last bits without a kill: docs/reliability.md has the probable cause.
RUN = ["run", "tiny", "--depth", str(DEPTH), "--place", "threads=1"]
RUN += ["--name", "killed", "--place", "save_every_seconds=2"]
RUN += [word for name, value in LONG.items() for word in ("--set", f"{name}={value}")]
SHORTEST, LONGEST = 4.0, 25.0  # seconds until a kill
CLOCKS = "report"  # which says how long things took


def test_a_run_killed_again_and_again_ends_as_one_left_alone(
    tmp_path: Path, campaign: Campaign
) -> None:
    moments, during = random.Random(campaign.seed), list[str]()
    whole = Home(tmp_path / "whole", *RUN)
    try:
        whole.finish()
        while len(during) < campaign.trials(3):
            killed = Home(tmp_path / f"killed-{len(during)}", *RUN)
            while len(during) < campaign.trials(3):
                seconds = moments.uniform(SHORTEST, LONGEST)
                # Each second kill is of a stage at work, however long the machine needs to start.
                working = len(during) % 2 == 1
                stages = killed.kill_after(seconds - working * SHORTEST, working=working)
                if stages is None:
                    break  # it had ended
                during.append(stages)
            killed.finish()
            compare(killed, whole)
        left = processes_of(tmp_path)
    finally:  # also if the campaign is stopped
        for process in processes_of(tmp_path):
            process.kill()
    campaign.found({stages: during.count(stages) for stages in sorted(set(during))})
    assert left == []


def compare(killed: Home, whole: Home) -> None:
    """Compare the artifacts of two homes, and every loss and score of their logs."""
    expected, actual = whole.manifests(), killed.manifests()
    assert {n: len(each) for n, each in actual.items()} == {n: len(e) for n, e in expected.items()}
    for stage, manifests in expected.items():
        for was, now in zip(manifests, actual[stage], strict=True):  # in order of fingerprints
            assert now["digest"] == was["digest"] or stage == CLOCKS, stage
            logs = [sorted(each["directory"].rglob("events.jsonl")) for each in (was, now)]
            first, last = ({k: v[-1] for k, v in values_in(*each).items()} for each in logs)
            assert last == first, stage
