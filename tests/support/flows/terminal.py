"""The command line as a user meets it: words in, lines out."""

import json
import shlex
from typing import Any

import pytest

from flows.cli.app import main
from tests.support.transcripts import Transcript


class Terminal:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], transcript: Transcript) -> None:
        self._capsys = capsys
        self._transcript = transcript

    def shows(self, *words: str, code: int = 0) -> list[str]:
        """Compare what a command prints with the transcript; return the lines of its stdout.

        A single text is split at its spaces. Lines of stderr stand after `! `.
        """
        argv = words[0].split() if len(words) == 1 else words
        assert main(argv) == code
        captured = self._capsys.readouterr()
        lines = captured.out.splitlines()
        notes = [f"! {line}" for line in captured.err.splitlines()]
        ending = [f"[{code}]"] if code else []
        self._transcript.check(f"nanochat {shlex.join(argv)}", "\n".join([*lines, *notes, *ending]))
        return lines

    def refuses(self, *words: str, code: int = 1, notes: tuple[str, ...] = ()) -> None:
        """Compare the error and the hint of a command that must fail with the transcript."""
        argv = words[0].split() if len(words) == 1 else words
        error, hint = self.fails(*argv, code=code, notes=notes)
        self._transcript.check(f"nanochat {shlex.join(argv)}", f"{error}\n{hint}")

    def run(self, *words: str, warns: str = "") -> tuple[int, list[str]]:
        """Return exit code and lines of a command that warns of this and prints no other note."""
        code = main(words)
        captured = self._capsys.readouterr()
        assert captured.err.startswith(f"warning: {warns}") if warns else captured.err == ""
        assert captured.err.count("\n") == bool(warns)
        return code, captured.out.splitlines()

    def said(self, *words: str, warns: str = "") -> list[str]:
        """Return the lines of a command that ends with 0."""
        code, lines = self.run(*words, warns=warns)
        assert code == 0
        return lines

    def hears(self, *words: str) -> str:
        """Return what a command that ends with 0 prints: its notes, then its result."""
        code = main(words)
        captured = self._capsys.readouterr()
        assert code == 0, captured.err
        return captured.err + captured.out

    def follows(self, *words: str, status: str = "failed") -> list[str]:
        """Return the lines of `status RUN --follow` of a run that ends with this status."""
        code = main(["status", *words, "--follow"])
        captured = self._capsys.readouterr()
        assert (code, captured.err.count("\n")) == (1, 1)
        assert captured.err.endswith(f" ended as {status}\n")
        return captured.out.splitlines()

    def read(self, *words: str, warns: str = "") -> Any:
        """Return what a command prints for programs."""
        return json.loads("".join(self.run(*words, "--json", warns=warns)[1]))

    def fails(self, *words: str, code: int = 1, notes: tuple[str, ...] = ()) -> tuple[str, str]:
        """Return error and hint of a command that must fail: one line each, and nothing else.

        Lines of progress that begin like one of `notes` may come before.
        """
        assert main(words) == code
        captured = self._capsys.readouterr()
        assert captured.out == ""
        *others, error, hint = captured.err.splitlines()
        assert [line for line in others if not line.startswith(notes)] == []
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
        return error.removeprefix("error: "), hint.removeprefix("hint: ")
