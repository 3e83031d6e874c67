"""What `nanochat COMMAND --help` says of the words a command takes."""

import pytest

from flows.cli.app import main, make_app
from infra.placement import SETTINGS
from tests.support.flows.terminal import Terminal

APP = make_app()
COMMANDS = [name for name in APP if not name.startswith("-")]


def test_there_are_commands() -> None:
    assert {"fetch", "pull", "push", "ls", "tag", "status"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_usage_calls_every_word_by_its_name(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    usage = capsys.readouterr().out.splitlines()[0].split()
    words = [
        argument.name
        for argument in APP[command].assemble_argument_collection()
        if argument.field_info.is_positional and argument.show
    ]
    assert usage[:3] == ["Usage:", "nanochat", command]
    named = [word.strip("[].") for word in usage[3:]]
    assert [word for word in named if word != "OPTIONS"][-len(words) or len(named) :] == words


@pytest.mark.parametrize("command", COMMANDS)
def test_a_paragraph_is_one_line_that_the_terminal_breaks(command: str) -> None:
    paragraphs = (APP[command].help or "").split("\n\n")
    assert paragraphs != [""]
    assert [paragraph for paragraph in paragraphs if "\n" in paragraph] == []


def options_of(command: str) -> set[str]:
    return {
        name
        for argument in APP[command].assemble_argument_collection()
        for name in argument.names
        if name.startswith("--")
    }


def test_talking_to_a_model_offers_nothing_that_only_training_reads() -> None:
    training = {"--device-batch-size", "--attention", "--compile", "--place"}
    assert training <= options_of("run")
    assert not training & options_of("chat")
    assert {"--home", "--store", "--gpus"} <= options_of("chat")


def boxes_of(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the lines of each box of a command's help at 80 columns, by title, in order."""
    assert main([command, "--help"]) == 0
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("\u256d"):
            found[line.strip("\u256d\u256e\u2500 ")] = []
        elif line.startswith("\u2502"):
            found[[*found][-1]].append(line.strip("\u2502").strip())
    return found


SHARED = ("What", "Where and how (same results, up to rounding)")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_a_command_stand_above_those_that_it_shares(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    titles = [*boxes_of(command, capsys)]
    assert titles[0] in ("Arguments", "Options", *SHARED)
    own = [title for title in titles if title not in SHARED]
    assert titles == own + [title for title in SHARED if title in titles]


def test_the_box_of_the_placement_is_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("run", "sweep", "plan", "ls"):
        box = boxes_of(command, capsys)[SHARED[1]]
        options = sum(line.startswith("-") for line in box)
        assert len(box) <= 2 * options


def test_a_setting_of_the_placement_that_is_like_no_other_is_answered_with_all(
    terminal: Terminal,
) -> None:
    error, hint = terminal.fails("plan", "tiny", "--place", "zzz=1")
    assert "zzz=1" in error
    assert set(SETTINGS) <= set(hint.replace(",", " ").split())
