"""The notebook: its commands are commands, and its Python runs on a store with a finished run."""

import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flows.cli.app import make_app
from nanochat_flows.client import open_client
from tests.support.flows.chat_model import write_chat_model
from tests.support.flows.measured import put_measured
from tests.support.flows.rows import publish_directory
from tests.support.flows.shelf import put_run

pytestmark = pytest.mark.torch

NOTEBOOK = json.loads(
    (Path(__file__).parents[3] / "docs" / "notebooks" / "tiny.ipynb").read_text(encoding="utf-8")
)
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]
COMMANDS = [source for source in SOURCES if source.startswith(("!", "%"))]
PYTHON = [source for source in SOURCES if source not in COMMANDS]


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with a run called tiny: a curve, scores, and a random model that chats."""
    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANOCHAT_STORE", raising=False)
    store = open_client().store
    steps = [{"step": n, "time": float(n), "loss": 5.5 / n} for n in (1, 2)]
    base = put_measured(store, "pretrain", metrics={"val_bpb": 1.25}, steps=steps)
    measured = {"chatcore": 0.25, "chatcore_low": 0.125, "chatcore_high": 0.375}
    scores = put_measured(store, "chat_eval_sft", metrics=measured)
    (tmp_path / "model").mkdir()
    write_chat_model(tmp_path / "model")
    model = publish_directory(store, "sft", tmp_path / "model")
    put_run(store, "tiny-1", base, model, scores)


def test_it_was_saved_without_its_outputs() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert [cell for cell in CELLS if cell["outputs"] or cell["execution_count"]] == []


def test_its_commands_install_the_clone_train_and_stop_the_server() -> None:
    install, *commands = COMMANDS
    assert install == "%pip install --quiet ../.."
    words = [shlex.split(command.removeprefix("!")) for command in commands]
    assert words == [["nanochat", "run", "tiny"], ["nanochat", "down"]]
    for _, name, *rest in words:
        make_app().parse_args([name, *rest])


@pytest.mark.usefixtures("finished")
def test_its_python_draws_the_curve_lists_scores_and_chats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[str] = []
    display = ModuleType("IPython.display")  # Jupyter's, which is not installed here
    display.SVG = drawn.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    scope: dict[str, object] = {}
    for source in PYTHON:
        exec(compile(source, "tiny.ipynb", "exec"), scope)
    (svg,) = drawn
    assert "mark-line" in svg
    printed = capsys.readouterr().out
    assert "chat_eval_sft       chatcore      0.250  (0.125 to 0.375)\n" in printed
    assert "val_bpb" not in printed  # without an interval
    answers = printed.partition("> Who are you?\n")[2].splitlines()
    assert answers[0]
    assert "> What is 15 - 3?" in answers


@pytest.mark.usefixtures("finished")
def test_a_chat_repeats_by_its_seed() -> None:
    first, again, other = (open_client().chat("tiny", max_tokens=8, seed=s) for s in (7, 7, 8))
    answers = [first.ask("hello"), first.ask("and again")]
    assert [again.ask("hello"), again.ask("and again")] == answers
    assert other.ask("hello") != answers[0]
