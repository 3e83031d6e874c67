"""requirements.lock: the versions of constraints.txt. That each has a hash pip demands itself."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"^([a-z0-9-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", flags=re.MULTILINE)


def locked() -> dict[str, str]:
    """Name -> version."""
    return dict(PIN.findall((ROOT / "requirements.lock").read_text(encoding="utf-8")))


def test_the_lock_and_the_constraints_name_the_same_versions() -> None:
    pins = PIN.findall((ROOT / "constraints.txt").read_text(encoding="utf-8").lower())
    constraints = dict(pins)
    differ = {n: v for n, v in locked().items() if constraints.get(n, v) != v}

    assert len(locked()) > 100
    assert len(constraints) == len(pins), "a package is named twice"
    assert differ == {}, "make lock"


def test_what_the_package_needs_is_locked_but_for_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=;~ ]", item)[0].lower() for item in wanted}

    assert names - locked().keys() == {"torch"}
