"""Every recipe of docs/guides/extend.md applies to a copy of the source, is small, and runs."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.identity.fingerprint import REPOSITORY
from infra.prefect.server import stop_server

GUIDE = REPOSITORY / "docs" / "guides" / "extend.md"
SOURCE = ("flows", "infra", "nanochat_core", "tasks", "deployments")
BESIDE = ("tests", "pyproject.toml", "bench")
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MOST_FILES = 3
SECONDS = 900  # for a command, on a busy machine
# A run of `tiny` that takes a minute: little text, few steps, an empty midtraining.
QUICK = (
    "--depth=1",
    "--set=shards.source=local",
    "--set=shards.num_shards=1",
    "--set=tokenizer.max_chars=200000",
    "--set=pretrain.num_steps=4",
    "--set=pretrain.eval_tokens=2048",
    "--set=base_eval.eval_tokens=2048",
    "--set=midtrain.mixture=[]",
    "--set=sft.eval_examples=16",
    "--set=rl.num_steps=1",
    "--set=rl.examples_per_step=2",
    "--set=rl.samples_per_example=4",
    "--set=rl.eval_examples=8",
)


@dataclass(frozen=True)
class Block:
    """A block of code of the guide."""

    kind: str
    path: str  # of the file that it makes or changes; empty for commands
    text: str


def recipes() -> dict[str, list[Block]]:
    """Return the blocks of every section that has one with a path."""
    sections = re.split(r"^## ", GUIDE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    found = {
        section.partition("\n")[0]: [Block(*groups) for groups in FENCE.findall(section)]
        for section in sections
    }
    return {title: blocks for title, blocks in found.items() if any(b.path for b in blocks)}


RECIPES = recipes()
WITH_COMMANDS = [title for title in RECIPES if any(b.kind == "console" for b in RECIPES[title])]


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
            ignored = shutil.ignore_patterns("__pycache__", "*.png")
            shutil.copytree(source, directory / name, ignore=ignored)
        else:
            shutil.copy(source, directory / name)
    return directory


def run(root: Path, home: Path, *words: str, code: int = 0) -> str:
    """Run a command with the source of `root`; return all that it printed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "NANOCHAT"))}
    own = {"PYTHONPATH": str(root), "NANOCHAT_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        words,
        cwd=root,
        env={**inherited, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == code, f"{shlex.join(words)}:\n{done.stdout}"
    return done.stdout


def nanochat(*words: str) -> Sequence[str]:
    return (sys.executable, "-m", "flows.cli.app", *words)


def apply_recipe(title: str, directory: Path) -> Path:
    """Return a copy of the source in which the recipe is applied."""
    root = copy_of(directory)
    for block in RECIPES[title]:
        if block.path:
            apply(block, root)
    return root


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_touches_three_source_files_at_most_and_passes_the_checks(
    title: str, tmp_path: Path
) -> None:
    root = apply_recipe(title, tmp_path / "copy")
    files = {block.path for block in RECIPES[title] if block.path}
    assert len([name for name in files if name.startswith(SOURCE)]) <= MOST_FILES
    for check in ("check", "format --check"):
        run(root, tmp_path, sys.executable, "-m", "ruff", *check.split(), *sorted(files))
    # The profile that the recipe runs, which it may have made itself.
    commands = "".join(block.text for block in RECIPES[title])
    profile = next(iter(re.findall(r"^\$ nanochat run (\w+)", commands, re.MULTILINE)), "tiny")
    plan = run(root, tmp_path / "home", *nanochat("plan", profile), code=2)  # 2: there is work
    assert "never built" in plan


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home for all recipes, so that each builds only what it changes."""
    directory = tmp_path_factory.mktemp("home")
    yield directory
    stop_server(directory)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text that takes no time to read."""
    directory = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(1000)]
    texts = (" ".join(rng.choices(words, k=60)) for _ in range(3000))
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    (directory / "words.jsonl").write_text(lines, "utf-8")
    return directory


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.torch
@pytest.mark.timeout(SECONDS * 3)
@pytest.mark.parametrize("title", WITH_COMMANDS)
def test_the_commands_of_a_recipe_print_what_the_guide_says(
    title: str, home: Path, text: Path, tmp_path: Path
) -> None:
    root = apply_recipe(title, tmp_path / "copy")
    shown = ""
    for line in "".join(b.text for b in RECIPES[title] if b.kind == "console").splitlines():
        if not line.startswith("$ "):
            assert line in shown, f"'{line}' is not in:\n{shown}"
            continue
        program, *words = shlex.split(line.removeprefix("$ "))
        if program == "nanochat":
            quick = (*QUICK, f"--set=shards.path={text}") if words[0] == "run" else ()
            shown = run(root, home, *nanochat(*words, *quick))
        elif program == "pytest":
            shown = run(root, home, sys.executable, "-m", "pytest", *words)
        else:
            shown = run(root, home, program, *words)
