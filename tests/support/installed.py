"""The wheel in a fresh virtual environment, beside the dependencies of this one."""

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
# Files with passwords: copies of the examples, and what an editor leaves of one.
FILLED_IN = (
    "infra/containers/stack.env",
    "infra/kubernetes/secrets.yaml",
    "infra/kubernetes/secrets.yaml~",
    "infra/systemd/nanochat.env",
)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """An environment with our wheel, used from a directory that is not a checkout."""

    bin: Path
    source: Path
    cwd: Path
    home: Path

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment to its end."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "NANOCHAT_", "PREFECT_"))
        }
        return subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.cwd,
            env=inherited | {"NANOCHAT_HOME": str(self.home), "NO_COLOR": "1"} | variables,
            capture_output=True,
            text=True,
            check=False,
        )


def copy_checkout(source: Path) -> None:
    """Copy the tracked files, and add files with passwords as a user does."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    for name in FILLED_IN:
        (source / name).write_text("PASSWORD=swordfish")
    # What an earlier version of the project has built here stays listed.
    (source / "nanochat_flows.egg-info").mkdir()
    (source / "nanochat_flows.egg-info" / "SOURCES.txt").write_text("\n".join(FILLED_IN))


def build(kind: str, source: Path, directory: Path) -> Path:
    """Build a wheel or an sdist and return its path."""
    command = [sys.executable, "-c", BUILD.format(kind=kind), str(directory)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = directory.iterdir()
    return made


def install(directory: Path) -> Installed:
    """Build the wheel from a copy of the checkout and install it."""
    source = directory / "source"
    copy_checkout(source)
    wheel = build("wheel", source, directory / "wheels")
    environment = directory / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)],
        check=True,
        capture_output=True,
    )
    # A .pth adds the folder of the dependencies, but runs no .pth of that folder: not the one of
    # an editable installation of this checkout.
    ours, theirs = (
        Path(sysconfig.get_path("purelib", vars={"base": str(base)}))
        for base in (environment, sys.prefix)
    )
    (ours / "dependencies.pth").write_text(f"{theirs}\n")
    cwd = directory / "elsewhere"
    cwd.mkdir()
    return Installed(bin=environment / "bin", source=source, cwd=cwd, home=directory / "home")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed once a run."""
    return install(tmp_path_factory.mktemp("wheel"))
