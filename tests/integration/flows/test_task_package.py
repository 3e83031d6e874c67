"""The packages of docs/contributing/task-package.md, installed by pip in their own directory."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.identity.fingerprint import REPOSITORY
from tests.support.installed import Installed

GUIDE = REPOSITORY / "docs" / "contributing" / "task-package.md"
FILE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the guide's files and the folder `site` with its packages."""
    directory = tmp_path_factory.mktemp("packages")
    for name, text in FILE.findall(GUIDE.read_text("utf-8")):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    # Not into this environment, and without the network that an isolated build needs.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--target", str(directory / "site"))
    install = (sys.executable, "-m", "pip", "install", *options, "./backwards", "./poems")
    subprocess.run(install, cwd=directory, check=True, capture_output=True)
    return directory


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """Return a folder with the guide's packages, to be edited, and with their files."""
    shutil.copytree(installed, tmp_path, dirs_exist_ok=True)
    return tmp_path / "site"


@pytest.fixture
def nanochat(site: Path) -> Callable[..., str]:
    """Return a function that runs a command in the folder of the package's profile."""
    bin, folder = Path(sys.executable).parent, site.parent
    here = Installed(bin=bin, source=site, cwd=folder, home=folder / "home")

    def run(*words: str) -> str:
        done = here.run("nanochat", *words, PYTHONPATH=f"{site}:{REPOSITORY}")
        assert "Traceback" not in done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_a_task_of_an_installed_package_is_built_and_its_code_is_identity(site, nanochat):
    built = nanochat("stage", "backwards.toml", "task_data")
    assert "backwards: 2,000 examples to train on, 100 to test with" in built
    assert "built  file://" in built
    module = site / "backwards.py"
    source = module.read_text("utf-8")

    def planned() -> str:
        (line,) = re.findall(r"^. task_data .*$", nanochat("plan", "backwards.toml"), re.MULTILINE)
        return line

    module.write_text(f"{source}# a comment\n", "utf-8")
    assert "up to date" in planned()
    module.write_text(source.replace('"eio"', '"eia"'), "utf-8")
    assert "code backwards changed" in planned()
    module.write_text(source.replace("TASK =", "NONE ="), "utf-8")
    assert nanochat("plan", "backwards.toml").splitlines() == [
        "error: task 'backwards' cannot be loaded from backwards:TASK: AttributeError: module "
        "'backwards' has no attribute 'TASK'",
        "hint: fix or uninstall the package that has it",
    ]


def test_text_of_an_installed_package_is_identity(site, nanochat):
    file = site.parent / "poems.txt"
    words = ("--set", "shards.source=poems", "--set", f"shards.path={file}")
    words = (*words, "--set", "shards.num_shards=1")
    assert nanochat("plan", "tiny", *words).splitlines() == [
        f"error: there is no file {file}",
        "hint: --set shards.path=FILE",
    ]
    file.write_text("\n***\n".join(f"poem {number}" for number in range(100)), "utf-8")
    built = nanochat("stage", "tiny", "shards", *words)
    assert "documents 100, characters 690" in built
    assert "built  file://" in built
    assert "= shards" in nanochat("plan", "tiny", *words)
    with (site / "poems.py").open("a", encoding="utf-8") as module:
        module.write("EXTRA = 1\n")
    assert re.search(r"^. shards .*code poems changed", nanochat("plan", "tiny", *words), re.M)
    file.write_text(file.read_text("utf-8") + "!", "utf-8")
    assert re.search(r"^. shards .*shards.snapshot", nanochat("plan", "tiny", *words), re.MULTILINE)
    assert nanochat("plan", "tiny", "--set", "shards.source=poem").splitlines() == [
        "error: shards.source is 'poem'",
        "hint: one of: pydocs, local, hub, s3, climbmix, fineweb-edu, poems",
    ]
