"""What `nanochat COMMAND --help` says of the words a command takes."""

import pytest

from flows.cli.app import main, make_app
from infra.placement import SETTINGS

APP = make_app()
NAMES = [name for name in APP if not name.startswith("-")]
COMMANDS = [name for name in NAMES if APP[name].default_command]


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


@pytest.mark.parametrize("group", sorted({*NAMES} - {*COMMANDS}))
def test_a_group_says_its_usage(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: nanochat {group}")


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


def test_the_help_says_what_the_placement_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    words = capsys.readouterr().out.replace(",", " ").replace(";", " ").split()
    assert set(SETTINGS) <= set(words)
