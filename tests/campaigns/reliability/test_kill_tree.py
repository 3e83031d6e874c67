"""kill -9 of everything, again and again: the run resumes where it was and ends the same.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills.
"""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.campaigns import Campaign
from tests.support.reliability.kills import Home, processes_of
from tests.support.reliability.small_training import values_in

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

SHOWS_CLOCKS = ("report",)  # how long things took is part of what the report card says
BEFORE_CHAT = ("shards", "task_data", "tokenizer", "tokens", "rows", "pretrain", "base_eval")


def test_a_run_killed_again_and_again_equals_an_undisturbed_one(
    tmp_path: Path, campaign: Campaign
) -> None:
    kills = campaign.trials(3)
    try:
        reports = kill_runs(tmp_path, kills=kills, seed=campaign.seed)
    finally:  # also if the campaign is stopped
        for process in processes_of(tmp_path):
            process.kill()
    campaign.found({part: report["kills_during"] for part, report in reports.items()})
    for part, report in reports.items():
        assert report["different_digests"] == [], part
        assert report["different_losses"] == [], part
        assert report["orphans"] == 0, part
        assert len(report["kills_during"]) == kills, part


def kill_runs(directory: Path, *, kills: int, seed: int) -> dict[str, dict[str, Any]]:
    """Run `tiny` undisturbed, then twice disturbed: as a whole, and only the stages of chat models.

    Pretraining is the longest stage and draws most kills; the second part leaves it out.
    """
    undisturbed, whole, chat = (
        Home(directory / name, "run", "tiny") for name in ("undisturbed", "whole", "chat")
    )
    if not undisturbed.path.exists():
        undisturbed.finish()
    for stage in BEFORE_CHAT:
        shutil.copytree(undisturbed.path / "store" / stage, chat.path / "store" / stage)
    return {
        "the whole run": disturb(whole, undisturbed, kills=kills, seed=seed, within=(4.0, 40.0)),
        "the chat stages": disturb(chat, undisturbed, kills=kills, seed=seed, within=(5.0, 16.0)),
    }


def disturb(
    disturbed: Home, undisturbed: Home, *, kills: int, seed: int, within: tuple[float, float]
) -> dict[str, Any]:
    """Kill runs after `within` seconds, then let one finish; return what differs."""
    moments = random.Random(seed)
    during: list[str] = []
    while len(during) < kills:
        stages = disturbed.kill_after(moments.uniform(*within))
        if stages is None:
            break
        during.append(stages)
    began = time.monotonic()
    disturbed.finish()
    expected, actual = only_manifests(undisturbed), only_manifests(disturbed)
    return {
        "kills_during": during,
        "last_seconds": round(time.monotonic() - began, 1),
        "different_digests": [
            stage
            for stage, manifest in expected.items()
            if stage not in SHOWS_CLOCKS
            and actual.get(stage, {"digest": "missing"})["digest"] != manifest["digest"]
        ],
        "different_losses": [
            stage
            for stage, manifest in expected.items()
            if stage not in actual or losses(actual[stage]) != losses(manifest)
        ],
        "orphans": len(processes_of(undisturbed.path)) + len(processes_of(disturbed.path)),
    }


def only_manifests(home: Home) -> dict[str, dict[str, Any]]:
    """Return the manifest of the only artifact of each stage."""
    found = home.manifests()
    assert all(len(manifests) == 1 for manifests in found.values()), "two artifacts of a stage"
    return {stage: manifests[0] for stage, manifests in found.items()}


def losses(manifest: dict[str, Any]) -> dict[tuple[str, int], dict[str, float]]:
    """Return the last values of every (kind, step) in a stage's log, clocks left out."""
    logs = sorted(manifest["directory"].rglob("events.jsonl"))
    return {place: values[-1] for place, values in values_in(*logs).items()}
