"""`nanochat completion`: bash completes with the script that it prints; each shell gets its own."""

import subprocess

import pytest

from flows.cli.app import main

BASH = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_nanochat
printf '%s\\n' "${COMPREPLY[@]}"
"""
MARKS = {
    "bash": "complete -F",
    "fish": "complete -c nanochat",
    "zsh": "#compdef nanochat",
}


@pytest.mark.parametrize("shell", MARKS)
def test_each_shell_gets_its_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert MARKS[shell] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("nanochat pl", ["plan"]),
        ("nanochat plan tiny --exit", ["--exit-code"]),
        ("nanochat infra sk", ["skypilot"]),
        ("nanochat run tiny --attention fa", ["fa2", "fa3", "fa4"]),
    ],
)
def test_bash_completes(line, completed, tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "nanochat"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    command = ["bash", "-c", BASH, "bash", str(script), *line.split()]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == completed
