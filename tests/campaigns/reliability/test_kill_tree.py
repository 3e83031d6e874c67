"""kill -9 of everything, again and again: the run goes on where it was and ends the same.

The figures of the last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of kills.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.campaigns import Campaign

pytestmark = [pytest.mark.torch, pytest.mark.prefect, pytest.mark.timeout(7200)]

CLOCKS = ("tokens_per_second", "seconds")
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
        assert report["kills"] == kills, part


def kill_runs(directory: Path, *, kills: int, seed: int) -> dict[str, dict[str, Any]]:
    """Run `tiny` undisturbed, then twice disturbed: as a whole, and only the stages of chat models.

    Pretraining is the longest stage and draws most kills; the second part leaves it out.
    """
    undisturbed = directory / "undisturbed"
    if not undisturbed.exists():
        finish(undisturbed)
    whole = disturb(directory / "whole", undisturbed, kills=kills, seed=seed, within=(4.0, 40.0))
    chat = directory / "chat"
    for stage in BEFORE_CHAT:
        shutil.copytree(undisturbed / "store" / stage, chat / "store" / stage)
    tail = disturb(chat, undisturbed, kills=kills, seed=seed, within=(5.0, 16.0))
    return {"the whole run": whole, "the chat stages": tail}


def disturb(
    disturbed: Path, undisturbed: Path, *, kills: int, seed: int, within: tuple[float, float]
) -> dict[str, Any]:
    """Kill runs after `within` seconds, then let one finish; returns what differs."""
    moments = random.Random(seed)
    places: list[str] = []
    while len(places) < kills:
        place = kill_after(disturbed, moments.uniform(*within))
        if place is None:
            break
        places.append(place)
    began = time.monotonic()
    finish(disturbed)
    expected, actual = manifests(undisturbed), manifests(disturbed)
    return {
        "kills": len(places),
        "killed_during": places,
        "last_seconds": round(time.monotonic() - began, 1),
        "stages": len(expected),
        "different_digests": [
            stage
            for stage in expected
            if stage not in SHOWS_CLOCKS and digest(actual, stage) != digest(expected, stage)
        ],
        "different_losses": [
            s for s in expected if losses(disturbed, actual, s) != losses(undisturbed, expected, s)
        ],
        "orphans": len(processes_of(undisturbed)) + len(processes_of(disturbed)),
    }


def start(home: Path) -> subprocess.Popen[bytes]:
    """`nanochat run tiny` in a session of its own."""
    home.mkdir(exist_ok=True)
    with (home / "console.log").open("ab") as log:
        return subprocess.Popen(
            [Path(sys.executable).with_name("nanochat"), "run", "tiny", "--home", home],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def finish(home: Path) -> None:
    """Run to the end, then stop the Prefect server too."""
    code = start(home).wait()
    subprocess.run(
        [Path(sys.executable).with_name("nanochat"), "down", "--home", home],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert code == 0, (home / "console.log").read_text(encoding="utf-8")[-3000:]


def kill_after(home: Path, seconds: float) -> str | None:
    """Start, wait, kill -9 the whole tree; returns the stages at work, or None when it ended."""
    process = start(home)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return None
    place = "+".join(sorted(working(home))) or "between stages"
    root = psutil.Process(process.pid)
    for victim in [*root.children(recursive=True), root]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()
    return place


def working(home: Path) -> list[str]:
    """Stages whose worker is running."""
    jobs = (p.cmdline()[-1] for p in processes_of(home) if "nanochat_core.worker" in p.cmdline())
    return [Path(job).parent.parent.name for job in jobs]


def processes_of(home: Path) -> list[psutil.Process]:
    """Processes that name the home directory on their command line."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(str(home) in word for word in words):
            found.append(process)
    return found


def manifests(home: Path) -> dict[str, dict[str, Any]]:
    """Stage name -> manifest of the only artifact of that stage in the home's store."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((home / "store").glob("*/*/manifest.json")):
        stage = path.parent.parent.name
        assert stage not in found, f"two artifacts of {stage}"
        found[stage] = {**json.loads(path.read_text(encoding="utf-8")), "directory": path.parent}
    return found


def digest(found: dict[str, dict[str, Any]], stage: str) -> str:
    """Content digest of a stage's artifact, or a word that equals none."""
    return found[stage]["digest"] if stage in found else "missing"


def losses(
    home: Path, found: dict[str, dict[str, Any]], stage: str
) -> dict[tuple[str, int], dict[str, float]]:
    """The last values of every (kind, step) in a stage's log, clocks left out."""
    values: dict[tuple[str, int], dict[str, float]] = {}
    for log in sorted(found[stage]["directory"].rglob("events.jsonl")):
        for line in log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["kind"] in ("step", "eval"):
                    kept = {k: v for k, v in event["values"].items() if k not in CLOCKS}
                    values[event["kind"], event["step"]] = kept
    return values
