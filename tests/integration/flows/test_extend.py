"""Every recipe of docs/contributing applies to a copy of the source, is small, and runs."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.identity.fingerprint import REPOSITORY
from tests.support.installed import Installed

PAGES = ("setting", "task", "stage", "metric", "option", "store")
SOURCE = ("flows", "infra", "nanochat_core", "tasks", "deployments")
BESIDE = ("tests", "pyproject.toml", "bench")
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAX_FILES = 3


@dataclass(frozen=True)
class Block:
    """A block of code of a guide."""

    kind: str
    path: str  # of the file that it makes or changes; empty for commands
    text: str


def recipes() -> dict[str, list[Block]]:
    """Return the blocks of every section that has one with a path."""
    pages = (REPOSITORY / "docs" / "contributing" / f"{page}.md" for page in PAGES)
    text = "".join(page.read_text("utf-8") for page in pages)
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = {
        section.partition("\n")[0]: [Block(*groups) for groups in FENCE.findall(section)]
        for section in sections
    }
    return {title: blocks for title, blocks in found.items() if any(b.path for b in blocks)}


RECIPES = recipes()


def paths_of(title: str) -> set[str]:
    """Return the files that a recipe makes or changes."""
    return {block.path for block in RECIPES[title] if block.path}


def apply(block: Block, root: Path) -> None:
    """Make the block's file, or change it where its unchanged and removed lines are."""
    path = root / block.path
    if block.kind == "python":
        assert not path.exists()
        path.write_text(block.text, "utf-8")
        return
    lines = block.text.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines)
    before, after = (
        "".join(f"{line[1:]}\n" for line in lines if line[:1] != sign) for sign in "+-"
    )
    text = path.read_text("utf-8")
    assert f"\n{text}".count(f"\n{before}") == 1, f"{block.path} has no such place:\n{before}"
    path.write_text(f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:], "utf-8")


def copy_of(directory: Path) -> Path:
    """Return a copy of the source in `directory`."""
    for name in (*SOURCE, *BESIDE):
        source = REPOSITORY / name
        if source.is_dir():
            # With what is compiled already, which holds for a copy of the same time and size.
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("*.png"))
        else:
            shutil.copy(source, directory / name)
    return directory


def run(root: Path, home: Path, *words: str) -> str:
    """Run a command with the source of `root`; return all that it printed."""
    here = Installed(bin=Path(sys.executable).parent, source=root, cwd=root, home=home)
    done = here.run(*words, PYTHONPATH=str(root), COLUMNS="200")
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def nanochat(*words: str) -> Sequence[str]:
    return (sys.executable, "-m", "flows.cli.app", *words)


def apply_recipe(title: str, root: Path) -> None:
    """Apply a recipe to the source in `root`."""
    for block in RECIPES[title]:
        if block.path:
            apply(block, root)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source for all recipes: each is taken back."""
    return copy_of(tmp_path_factory.mktemp("copy"))


@pytest.fixture
def root(source: Path, title: str) -> Iterator[Path]:
    """The copy with a recipe applied."""
    try:
        apply_recipe(title, source)
        yield source
    finally:
        for path in paths_of(title):
            (source / path).unlink(missing_ok=True)
            if (REPOSITORY / path).exists():
                # With its time, by which Python knows whether bytecode is of this text.
                shutil.copy2(REPOSITORY / path, source / path)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all recipes: what the first plan finds in a file, the next need not scan."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_touches_three_source_files_at_most_and_passes_the_checks(
    title, root, tmp_path, home
):
    files = paths_of(title)
    assert len([name for name in files if name.startswith(SOURCE)]) <= MAX_FILES
    for check in ("check", "format --check"):
        run(root, tmp_path, sys.executable, "-m", "ruff", *check.split(), *sorted(files))
    # The profile that the recipe runs, which it may have made itself.
    commands = "".join(block.text for block in RECIPES[title])
    profile = next(iter(re.findall(r"^\$ nanochat run (\w+)", commands, re.MULTILINE)), "tiny")
    plan = run(root, home, *nanochat("plan", profile))
    assert "never built" in plan
