"""kill -9 of midtraining, SFT and RL at any moment: they go on, and end with the same bytes.

`make slow` runs it; the figures of the last run are in docs/reliability.md. By hand:

    .venv/bin/python -m tests.reliability.test_kill_chat --kills 10 --seed 1

It is the campaign of test_kill_training.py on jobs of the chat stages: the files a job leaves (for
RL, samples of its answers too), and all that any attempt told, must be those of a job that nobody
touched. RL is paid only while some answers are right and others wrong, which the report counts.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanochat_core.job import Job
from tests.reliability.small_chat import STAGES, make_chat_inputs, make_chat_job
from tests.reliability.small_training import told
from tests.reliability.test_kill_training import land_kills

pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
def test_ten_kills_change_nothing(tmp_path: Path, stage: str) -> None:
    report = chat_campaign(tmp_path, stage, kills=10, ranks=1, seed=1)
    assert report["kills"] >= 10
    assert report["faults"] == []
    assert report["steps_that_learn"] > report["steps"] / 2


def chat_campaign(
    directory: Path, stage: str, *, kills: int, ranks: int, seed: int
) -> dict[str, Any]:
    """Land so many kills on a chat stage; `faults` of the report must be empty."""
    inputs = make_chat_inputs(directory / "inputs")
    make = partial(make_chat_job, stage=stage, inputs=inputs)
    report = land_kills(make, directory, kills=kills, ranks=ranks, seed=seed)
    undisturbed = Job.read(directory / "undisturbed" / "job.json")
    steps = [values[0] for (kind, _), values in told(undisturbed).items() if kind == "step"]
    learning = sum(values.get("useful_share", 1.0) > 0 for values in steps)
    return {"stage": stage, **report, "steps": len(steps), "steps_that_learn": learning}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stage", choices=STAGES, action="append")
    given = parser.parse_args()
    failed = False
    for stage in given.stage or STAGES:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = chat_campaign(
                Path(folder), stage, kills=given.kills, ranks=given.ranks, seed=given.seed
            )
        report["seconds"] = round(time.monotonic() - began)
        failed = failed or bool(report["faults"])
        print(json.dumps(report), flush=True)  # noqa: T201
    sys.exit(1 if failed else 0)
