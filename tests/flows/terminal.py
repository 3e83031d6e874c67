"""The command line as a person uses it: words in, lines out."""

import json
from typing import Any

import pytest

from flows.cli import main


class Terminal:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *words: str) -> tuple[int, list[str]]:
        """Exit code and printed lines of a command that says nothing is wrong."""
        code = main(words)
        captured = self._capsys.readouterr()
        assert captured.err == ""
        return code, captured.out.splitlines()

    def said(self, *words: str) -> list[str]:
        """The lines of a command that ends with 0."""
        code, lines = self.run(*words)
        assert code == 0
        return lines

    def read(self, *words: str) -> Any:
        """What a command prints for programs."""
        return json.loads("".join(self.run(*words, "--json")[1]))

    def fails(self, *words: str) -> tuple[str, str]:
        """Error and hint of a command that must fail: one line each, and nothing else."""
        assert main(words) == 1
        captured = self._capsys.readouterr()
        assert captured.out == ""
        error, hint = captured.err.splitlines()
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
        return error.removeprefix("error: "), hint.removeprefix("hint: ")
