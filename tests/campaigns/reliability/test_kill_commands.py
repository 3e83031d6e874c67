"""kill -9 of a command and all that it started, again and again: it ends as one left alone.

The figures are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills of each case.
"""

import random
import shutil
from pathlib import Path

import pytest

from tests.campaigns.end_to_end.small import DEPTH, SETTINGS
from tests.support.campaigns import Campaign
from tests.support.reliability.kills import Home, processes_of
from tests.support.reliability.small_training import values_in

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

# Two threads once gave other last bits without a kill: docs/reliability.md has the probable cause.
ONE_THREAD = ("--place", "threads=1", "--place", "save_every_seconds=2")
LONG = {**SETTINGS, "pretrain.num_steps": 600, "rl.num_steps": 20}
RUN = ["run", "tiny", "--depth", str(DEPTH), "--name", "killed", *ONE_THREAD]
RUN += [word for name, value in LONG.items() for word in ("--set", f"{name}={value}")]
SWEEP = ["sweep", "tiny", "--depth", "2", "--name", "lr", "--gpus", "0", "--seeds", "1,2,3"]
SWEEP += ["--vary", "optimizer.muon_lr=0.002,0.01,0.04,0.2", "--set", "pretrain.num_steps=60"]
SWEEP += ["--set", "pretrain.eval_tokens=4096", "--set", "tokenizer.max_chars=1000000", *ONE_THREAD]
TEXT = ("shards", "tokenizer", "tokens", "rows")
# The command, seconds until a kill, and the stages that are copied: they would draw all kills.
CASES = {
    "a run": (RUN, (4.0, 25.0), ()),
    "a sweep": (SWEEP, (8.0, 24.0), TEXT),
}
CLOCKS = "report"  # which says how long things took


@pytest.mark.parametrize("case", CASES)
def test_a_command_killed_again_and_again_ends_as_one_left_alone(
    case: str, tmp_path: Path, campaign: Campaign
) -> None:
    argv, within, copied = CASES[case]
    moments, during = random.Random(campaign.seed), list[str]()
    whole = Home(tmp_path / "whole", *argv)
    try:
        whole.finish()
        while len(during) < campaign.trials(3):
            killed = Home(tmp_path / f"killed-{len(during)}", *argv)
            for stage in copied:
                shutil.copytree(whole.path / "store" / stage, killed.path / "store" / stage)
            while len(during) < campaign.trials(3):
                seconds = moments.uniform(*within)
                # Each second kill is of a stage at work, however long the machine needs to start.
                working = len(during) % 2 == 1
                stages = killed.kill_after(seconds - working * within[0], working=working)
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
    """Compare the artifacts of two homes, every loss and score of their logs, and the pages."""
    expected, actual = whole.manifests(), killed.manifests()
    assert {n: len(each) for n, each in actual.items()} == {n: len(e) for n, e in expected.items()}
    for stage, manifests in expected.items():
        for was, now in zip(manifests, actual[stage], strict=True):  # in order of fingerprints
            assert now["digest"] == was["digest"] or stage == CLOCKS, stage
            logs = [sorted(each["directory"].rglob("events.jsonl")) for each in (was, now)]
            first, last = ({k: v[-1] for k, v in values_in(*each).items()} for each in logs)
            assert last == first, stage
    for page in (path for path in whole.path.glob("sweep/lr/sweep.*") if path.is_file()):
        text = (killed.path / page.relative_to(whole.path)).read_bytes()
        assert text.replace(bytes(killed.path), b"") == page.read_bytes().replace(
            bytes(whole.path), b""
        )
