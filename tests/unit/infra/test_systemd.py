"""The units of systemd: they start commands that exist, and give a run the time to save."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.infra.deployed import INFRA, MIN_GRACE, SECRET, mistake

HERE = INFRA / "systemd"
UNITS = sorted(HERE.glob("*.service"))
EXAMPLE = (HERE / "nanochat.env.example").read_text()


def settings(unit: Path) -> dict[str, str]:
    """Name -> value of a unit's lines."""
    return dict(re.findall(r"(?m)^(\w+)=(.+)$", unit.read_text()))


def test_there_is_a_unit_for_a_server_and_one_for_a_worker() -> None:
    assert [unit.name for unit in UNITS] == ["nanochat-server.service", "nanochat-worker@.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    program, *words = shlex.split(settings(unit)["ExecStart"].replace("%i", "gpu"))
    assert Path(program).is_absolute()
    assert mistake([Path(program).name, *words]) is None


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_only_the_supervisor_is_asked_to_end_and_a_run_has_the_time_to_save(unit: Path) -> None:
    found = settings(unit)
    assert found["KillMode"] == "mixed"
    assert int(found["TimeoutStopSec"]) >= MIN_GRACE
    assert found["User"] != "root"
    assert found["OOMPolicy"] == "continue"  # one that is killed for memory does not end the others
    # The home of the example is created for that user.
    assert f"NANOCHAT_HOME=/var/lib/{found['StateDirectory']}\n" in EXAMPLE


def test_workers_of_two_pools_on_one_machine_can_have_a_home_each() -> None:
    unit = (HERE / "nanochat-worker@.service").read_text()
    files = re.findall(r"(?m)^EnvironmentFile=(.+)$", unit)
    assert files == ["/etc/nanochat.env", "-/etc/nanochat-%i.env"]  # the later one wins


def test_the_example_has_no_secret() -> None:
    values = dict(re.findall(r"(?m)^#?(\w+)=(.*)$", EXAMPLE))
    assert {name for name in values if SECRET.search(name)} >= {"PREFECT_API_AUTH_STRING"}
    assert [name for name, value in values.items() if SECRET.search(name) and value] == []
