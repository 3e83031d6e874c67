"""The help of the command line, and what ends a command."""

import contextlib
import importlib
import inspect
import io
import signal
import sys
import time
from importlib.metadata import version

import pytest

from flows.cli.app import main, make_app
from flows.cli.train.run import resumable
from flows.orchestration.local_run import stoppable

APP = make_app()


COMMANDS = {name: APP[name] for name in APP if not name.startswith("-")}


def arguments_of(command):
    return APP[command].assemble_argument_collection(parse_docstring=True)


def test_the_help_lists_every_command_and_has_several_names(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = terminal.shows("--help")
    assert terminal.said("help") == terminal.said("-h") == terminal.said() == whole
    plan = terminal.said("plan", "--help")
    assert terminal.said("--help", "plan") == terminal.said("help", "plan") == plan
    assert plan[0].startswith("Usage: nanochat plan [OPTIONS] PROFILE")


def test_a_terminal_without_some_letters_shows_question_marks(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["--help"]) == 0
    assert b"nanochat" in written.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_has_every_option_and_markdown_takes_no_character_but_backticks(
    command, monkeypatch, terminal
):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = [argument for argument in arguments_of(command) if argument.show]
    assert [a for a in arguments if a.parse and not a.parameter.help] == []
    about = inspect.cleandoc(APP[command].help).partition("\n\nArgs:")[0]
    shown = " ".join(" ".join(terminal.said(command, "--help")).replace("\u2502", " ").split())
    helps = [about, *(a.parameter.help for a in arguments)]
    for words in (inspect.cleandoc(text).replace("`", "").split() for text in helps if text):
        assert [word for word in words if word not in shown] == []


def test_a_help_has_its_own_options_first_and_those_of_a_place_last(monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("run", "chat", "push", "ls"):
        terminal.shows(command, "--help")


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_the_packages(word, terminal):
    assert terminal.said(word) == [version("nanochat-flows")]


def test_programs_get_the_size_of_each_profile(terminal):
    d12 = next(row for row in terminal.read("config") if row["profile"] == "d12")
    assert (d12["depth"], d12["parameters"]) == (12, 286_261_730)
    assert d12["about"]


def test_a_command_that_exits_at_once_prints_how_to_resume(monkeypatch, capsys):
    monkeypatch.setattr("os._exit", sys.exit)

    def stop_twice():
        with resumable("nanochat run tiny", stages=["sft"]) as display, stoppable(display):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as left:
        stop_twice()
    assert left.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\nhint: resume with: nanochat run tiny\n"


def test_an_import_that_is_interrupted_is_finished_first(tmp_path, monkeypatch):
    # Left in the middle it can hold the lock of all imports, for which other threads then wait.
    (tmp_path / "interrupted.py").write_text(
        "import signal, time\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "time.sleep(0.2)\n"  # the signal comes again meanwhile
        "done = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def stop():
        with resumable("nanochat run tiny", stages=["sft"]) as display, stoppable(display):
            importlib.import_module("interrupted")
            while True:  # until the signal comes once more
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert sys.modules.pop("interrupted").done
