"""The task for SkyPilot: it survives its machine, and starts commands that there are."""

import re
import shlex
from typing import Any

import yaml

from flows.profiles import PROFILES
from tests.support.infra.deployed import INFRA, ROOT, SECRET, mistake

TEXT = (INFRA / "skypilot" / "speedrun.yaml").read_text()
TASK: dict[str, Any] = yaml.safe_load(TEXT)


def test_a_machine_that_is_taken_away_is_replaced() -> None:
    assert TASK["resources"]["use_spot"] is True
    assert TASK["resources"]["accelerators"] == "H100:8"
    assert TASK["resources"]["job_recovery"]["strategy"]
    assert "file_mounts" not in TASK  # all that is to last goes to the store


def test_nothing_starts_without_a_store_that_outlives_the_machine() -> None:
    assert TASK["envs"]["NANOCHAT_STORE"] is None  # SkyPilot asks for a value of these


def test_it_runs_commands_that_there_are() -> None:
    lines = [line.strip() for line in (TASK["setup"] + TASK["run"]).splitlines()]
    ours = [line for line in lines if ".venv/bin/nanochat" in line]
    assert len(ours) == 2
    for line in ours:
        words = shlex.split(line.removeprefix("exec ").replace("$PROFILE", TASK["envs"]["PROFILE"]))
        assert mistake(["nanochat", *words[1:]]) is None
    assert TASK["envs"]["PROFILE"] in PROFILES


def test_its_targets_of_make_are_there() -> None:
    targets = re.findall(r"(?m)^\s*make (\w+)", TASK["setup"])
    assert targets
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if f"\n{name}:" not in makefile] == []


def test_secrets_are_secrets_and_have_no_values() -> None:
    assert set(TASK["secrets"].values()) == {None}
    assert [name for name in TASK["envs"] if SECRET.search(name)] == []
