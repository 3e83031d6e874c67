"""The command line as a person uses it: words in, lines out."""

import json
from typing import Any

import pytest

from flows.cli.app import main


class Terminal:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *words: str, warns: str = "") -> tuple[int, list[str]]:
        """Exit code and printed lines of a command that warns of this and says nothing else."""
        code = main(words)
        captured = self._capsys.readouterr()
        assert captured.err.startswith(f"warning: {warns}") if warns else captured.err == ""
        assert captured.err.count("\n") == bool(warns)
        return code, captured.out.splitlines()

    def said(self, *words: str, warns: str = "") -> list[str]:
        """The lines of a command that ends with 0."""
        code, lines = self.run(*words, warns=warns)
        assert code == 0
        return lines

    def follows(self, *words: str, status: str = "failed") -> list[str]:
        """The lines of `status RUN --follow` of a run that ends with this status."""
        code = main(["status", *words, "--follow"])
        captured = self._capsys.readouterr()
        assert (code, captured.err.count("\n")) == (1, 1)
        assert captured.err.endswith(f" ended as {status}\n")
        return captured.out.splitlines()

    def read(self, *words: str, warns: str = "") -> Any:
        """What a command prints for programs."""
        return json.loads("".join(self.run(*words, "--json", warns=warns)[1]))

    def fails(self, *words: str, code: int = 1) -> tuple[str, str]:
        """Error and hint of a command that must fail: one line each, and nothing else."""
        assert main(words) == code
        captured = self._capsys.readouterr()
        assert captured.out == ""
        error, hint = captured.err.splitlines()
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
        return error.removeprefix("error: "), hint.removeprefix("hint: ")
