"""`nanochat completion`: each shell completes with the script that it prints."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.cli.app import main

BASH = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_nanochat
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete -C $argv[2]"
# A terminal of zsh's own in which the completion is asked for with Tab.
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f
zpty -w shell "PS1=; fpath=($1:h $fpath); autoload -Uz compinit; compinit -u -D; echo re''ady"
zpty -r -m shell line '*ready*'
zpty -w -n shell "$2"$'\\t\\t'
for word in "${@:3}"; do seen+="*$word"; done
zpty -r -m shell line "$seen*" && print -rl -- "${@:3}"
"""
NAMES = {"bash": "nanochat", "fish": "nanochat.fish", "zsh": "_cyclopts_nanochat"}


@pytest.fixture(scope="module", params=NAMES)
def script(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of a shell, under the name by which the shell finds it."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    path = tmp_path_factory.mktemp(request.param) / NAMES[request.param]
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        assert main(["completion", request.param]) == 0
    return path


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("nanochat pl", ["plan"]),
        ("nanochat plan tiny --exit", ["--exit-code"]),
        ("nanochat infra sk", ["skypilot"]),
        ("nanochat run tiny --attention fa", ["fa2", "fa3", "fa4"]),
    ],
)
def test_a_shell_completes(script, line, completed, tmp_path):
    words = {
        "nanochat": ["bash", "-c", BASH, "bash", str(script), *line.split()],
        "nanochat.fish": ["fish", "-c", FISH, str(script), line],
        "_cyclopts_nanochat": ["zsh", "-c", ZSH, "zsh", str(script), line, *completed],
    }
    done = subprocess.run(
        words[script.name],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = sorted(each.partition("\t")[0] for each in done.stdout.splitlines())
    assert found == completed
