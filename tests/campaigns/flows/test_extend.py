"""The commands of each recipe of docs/contributing print what the guide says."""

import json
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.prefect.server import stop_server
from tests.integration.flows.test_extend import (
    RECIPES,
    apply_recipe,
    copy_of,
    nanochat,
    run,
)

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


WITH_COMMANDS = [title for title in RECIPES if any(b.kind == "console" for b in RECIPES[title])]


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


@pytest.mark.prefect
@pytest.mark.torch
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("title", WITH_COMMANDS)
def test_the_commands_of_a_recipe_print_what_the_guide_says(
    title: str, home: Path, text: Path, tmp_path: Path
) -> None:
    root = copy_of(tmp_path / "copy")
    apply_recipe(title, root)
    shown = ""
    for line in "".join(b.text for b in RECIPES[title] if b.kind == "console").splitlines():
        if not line.startswith("$ "):
            assert line in shown, f"'{line}' is not in:\n{shown}"
            continue
        program, *words = shlex.split(line.removeprefix("$ "))
        if program == "nanochat":
            quick: tuple[str, ...] = ()
            if words[0] == "run":
                # The run keeps the name that the guide's own command would give it.
                name = () if "--name" in words else (f"--name={words[1]}",)
                quick = (*QUICK, f"--set=shards.path={text}", *name)
            shown = run(root, home, *nanochat(*words, *quick))
        elif program == "pytest":
            shown = run(root, home, sys.executable, "-m", "pytest", *words)
        else:
            shown = run(root, home, program, *words)
