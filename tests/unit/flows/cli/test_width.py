"""What a narrow terminal shows: no line is wider, and colour marks only what will run."""

import re
import sys

import pytest

from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point
from flows.cli.app import main
from flows.stages import SFT
from infra.storage.base import Store
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

NARROW = 60
LONG = "a-name-that-is-longer-than-most-are"


@pytest.fixture(autouse=True)
def filled(store: Store) -> None:
    """A run with a long name, a tag and a revoked artifact."""
    sft = put_artifact(store, make_manifest("sft", run=f"{LONG}-1", config={"seed": 1}))
    rl = put_artifact(store, make_manifest("rl", run=f"{LONG}-1", inputs={"sft": sft}))
    put_run(store, f"{LONG}-1", sft, rl, name=LONG, overrides=("seed=1",))
    point(store, "main", f"{LONG}-1")
    why = "it learnt from the test data " * 3
    revoke(store, rl, why=why, who="me", when="2026-11-21T07:00:00Z")


@pytest.mark.parametrize(
    "words",
    ["ls", f"ls {LONG}", "status", "tag", "plan tiny", "plan tiny --depth 2", "gc"],
)
def test_no_line_is_wider_than_the_terminal(words, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    _, wide = terminal.run(*words.split())
    monkeypatch.setenv("COLUMNS", str(NARROW))
    _, piped = terminal.run(*words.split())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, narrow = terminal.run(*words.split())
    assert " ".join(narrow).split() == " ".join(wide).split()
    # Sentences are broken by the terminal itself; so is a line of one word.
    tables = [line for line in narrow if not re.match(r"run |\d|.*: ", line)]
    assert [line for line in tables if len(line) > NARROW and len(line.split()) > 1] == []
    assert piped == wide  # a pipe gets one line for each row


def test_only_what_will_run_is_in_colour(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    from flows.cli.output import print_lines
    from flows.plan.plan import STATES, StagePlan
    from flows.plan.render import table

    print_lines([table((StagePlan(stage=SFT, state=sign), "sft") for sign in STATES)])
    shown = capsys.readouterr().out.splitlines()
    coloured = {line.split("m", 1)[1][0] for line in shown if re.match(r"\x1b\[3\dm", line)}
    assert coloured == {"+", "~", ">", "!", "x"}
    assert [line for line in shown if "32m" in line] == []


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_colour_is_left_out_when_asked(no_color, is_coloured, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", no_color)
    assert main(["plan", "tinny"]) == 1
    assert ("\x1b[1;31merror:\x1b[0m " in capsys.readouterr().err) == is_coloured
