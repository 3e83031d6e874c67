"""One version of the code plans the same wherever it lies: two clones and an installed wheel."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flows.identity.fingerprint import REPOSITORY, Code
from flows.profiles import open_profile
from flows.stages import STAGES
from infra.storage.local import LocalStore
from tests.support.flows.house import build
from tests.support.flows.repository import copy_packages

WHEEL = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
PARTS = ("deployments/__init__.py", "LICENSE", "docs/package.md", "pyproject.toml")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose store has every stage of tiny, as today's code makes it."""
    home = tmp_path_factory.mktemp("home")
    tiny = open_profile("tiny").run
    build(LocalStore(home / "store"), home / "work", Code(REPOSITORY), run=tiny)
    return home


def clone(directory: Path) -> Path:
    """A copy of what a clone has of the code."""
    copy_packages(directory)
    for part in PARTS:
        (directory / part).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / part, directory / part)
    return directory


def install(source: Path, directory: Path) -> Path:
    """Build a wheel in `source` and unpack it."""
    command = [sys.executable, "-c", WHEEL, str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "packages")
    return directory / "packages"


def plan(root: Path, home: Path) -> tuple[dict[str, str], set[str]]:
    """The fingerprint of every stage that is up to date, and the names of the others."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.app", "plan", "tiny", "--json", "--gpus", "0"],
        cwd=root,
        env=os.environ | {"NANOCHAT_HOME": str(home), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    items = json.loads(done.stdout)["stages"]
    assert [item["stage"] for item in items] == [stage.name for stage in STAGES]
    made = {item["stage"]: item["artifact"]["fingerprint"] for item in items if item["artifact"]}
    return made, {item["stage"] for item in items} - made.keys()


def test_two_clones_and_a_wheel_plan_the_same_and_an_edit_is_seen_in_one_alone(home, tmp_path):
    first, second = clone(tmp_path / "first"), clone(tmp_path / "second")
    (tmp_path / "wheel").mkdir()
    places = [first, second, install(clone(tmp_path / "source"), tmp_path / "wheel")]
    plans = [plan(place, home) for place in places]
    assert len(plans[0][0]) == len(STAGES)
    assert plans[0][1] == set()
    assert plans == [plans[0]] * 3

    path = places[2] / "nanochat_core/engine/native/kernels_model.h"
    path.write_text(path.read_text() + "static int edited;\n")
    seen = plan(places[2], home)[1]
    assert "base_eval" in seen
    assert "rows" not in seen
    assert plan(second, home)[1] == set()
