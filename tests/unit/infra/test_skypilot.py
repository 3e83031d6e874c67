"""The tasks for SkyPilot: they survive their machines, and start commands that there are."""

import re
import shlex
from typing import Any

import pytest
import yaml

from flows.profiles import PROFILES
from flows.stages import STAGES
from tests.support.infra.deployed import INFRA, ROOT, SECRET, mistake

TEXT = (INFRA / "skypilot" / "speedrun.yaml").read_text()
HEAD, DATA, TRAIN = yaml.safe_load_all(TEXT)
BOTH = pytest.mark.parametrize("task", [DATA, TRAIN], ids=["data", "train"])


@BOTH
def test_a_machine_that_is_taken_away_is_replaced(task: Any) -> None:
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["job_recovery"]["strategy"]
    assert "file_mounts" not in task  # all that is to last goes to the store


def test_no_gpu_waits_for_data_and_only_its_machine_differs() -> None:
    assert set(HEAD) == {"name"}
    assert "accelerators" not in DATA["resources"]
    assert TRAIN["resources"]["accelerators"] == "H100:8"
    for name in ("setup", "envs", "secrets", "workdir"):
        assert DATA[name] == TRAIN[name]


def test_the_first_task_makes_all_that_comes_before_the_first_gpu_stage() -> None:
    made = re.search(r"for stage in (.*); do", DATA["run"])
    assert made
    first_gpu = next(stage for stage in STAGES if stage.compute == "gpu")
    needs_no_gpu = [s for s in STAGES[: STAGES.index(first_gpu)] if s.compute == "cpu"]
    assert made[1].split() == [stage.name for stage in needs_no_gpu]


@BOTH
def test_nothing_starts_without_a_store_that_outlives_the_machine(task: Any) -> None:
    assert task["envs"]["NANOCHAT_STORE"] is None  # SkyPilot asks for a value of these


@BOTH
def test_it_runs_commands_that_there_are(task: Any) -> None:
    lines = [line.strip() for line in (task["setup"] + task["run"]).splitlines()]
    ours = [line for line in lines if ".venv/bin/nanochat" in line]
    assert len(ours) == 2
    for line in ours:
        filled = line.replace("$PROFILE", task["envs"]["PROFILE"]).replace("$stage", "shards")
        words = shlex.split(filled.removeprefix("exec "))
        assert mistake(["nanochat", *words[1:]]) is None
    assert task["envs"]["PROFILE"] in PROFILES


def test_its_targets_of_make_are_there() -> None:
    targets = re.findall(r"(?m)^\s*make (\w+)", TRAIN["setup"])
    assert targets
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []


@BOTH
def test_secrets_are_secrets_and_have_no_values(task: Any) -> None:
    assert set(task["secrets"].values()) == {None}
    assert [name for name in task["envs"] if SECRET.search(name)] == []
