"""Texts that the product prints, stored as files under tests/transcripts and reviewed as diffs.

`UPDATE=1 pytest ...` writes the files of the tests that pass. Without it a test fails whose text is
another one, or has no file; test_transcripts.py finds the files of tests that are gone.
"""

import getpass
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "transcripts"
_HEX = re.compile(r"(?<![\w.])([0-9a-f]{12})([0-9a-f]{52})?(?!\w)")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?=(?:\.\d+)?Z)")


def path_of(test: Path, function: str, case: str = "") -> Path:
    """Return the transcript of a test function in a file, and of its case if it has several."""
    folder = (FOLDER / test.relative_to(TESTS)).with_name(test.stem.removeprefix("test_"))
    return folder / f"{function.removeprefix('test_')}{case}.txt"


class Transcript:
    """The texts of one test, in order. Each has a head, `$ ` and what it is the text of."""

    def __init__(self, path: Path, replaced: dict[str, str]) -> None:
        """Read the file; `replaced` has texts that differ from run to run and what stands there."""
        self._path = path
        self._replaced = replaced
        self._seen: dict[str, str] = {}
        self._found: list[str] = []
        self._started = int(time.time())
        stored = path.read_text(encoding="utf-8") if path.exists() else ""
        self._stored = re.split(r"^(?=\$ )", stored, flags=re.MULTILINE)[1:]

    def replace(self, value: str, name: str) -> None:
        """Have a name stand for a text that differs from run to run."""
        self._replaced[value] = name

    def check(self, head: str, text: str) -> None:
        """Compare the next text with the stored one, or store it if UPDATE is set.

        Paths and times of this run, fingerprints and digests are replaced by names of their length:
        the same name stands for the same digest in the whole transcript.
        """
        number, found = len(self._found), self._normalised(f"$ {head}\n{text.rstrip()}\n\n")
        self._found.append(found)
        if not os.environ.get("UPDATE"):
            stored = self._stored[number] if number < len(self._stored) else "no transcript\n"
            assert found.rstrip() == stored.rstrip(), f"{self._path}; UPDATE=1 pytest writes it"

    def refused(
        self, head: str, kind: type[Exception], call: Callable[..., object], *given: Any
    ) -> None:
        """Check the one line, and the hint if there is one, of the error that a call ends in."""
        with pytest.raises(kind) as error:
            call(*given)
        assert "\n" not in str(error.value)
        hint = getattr(error.value, "hint", None)
        self.check(head, f"{error.value}\nhint: {hint}" if hint else str(error.value))

    def finish(self) -> None:
        """Fail if the file has more texts than the test, or write it if UPDATE is set."""
        if not os.environ.get("UPDATE"):
            assert self._stored[len(self._found) :] == [], f"{self._path} has texts of no command"
        elif self._found:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(self._found).rstrip() + "\n", encoding="utf-8")
        else:
            self._path.unlink(missing_ok=True)

    def _normalised(self, text: str) -> str:
        for value, name in self._replaced.items():
            text = text.replace(value, name)
        text = _STAMP.sub(self._name_of_time, _HEX.sub(self._name_of_digest, text))
        return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)

    def _name_of_digest(self, found: re.Match[str]) -> str:
        name = self._seen.setdefault(found[1], f"id{len(self._seen) + 1:.>10}")
        return name + ("..." if found[2] else "")

    def _name_of_time(self, found: re.Match[str]) -> str:
        when = datetime.fromisoformat(found[0]).replace(tzinfo=UTC).timestamp()
        return "time-of-the-test..." if self._started <= when <= time.time() else found[0]


@pytest.fixture
def transcript(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transcript]:
    """The transcript of this test, complete when the test ends."""
    node = request.node
    case = re.sub(r"[^\w.]+", "-", node.name.removeprefix(node.originalname)).rstrip("-")
    before = request.session.testsfailed
    replaced = {str(tmp_path): "TMP", f"{getpass.getuser()}@{socket.gethostname()}": "USER@HOST"}
    found = Transcript(path_of(node.path, node.originalname, case), replaced)
    yield found
    if request.session.testsfailed == before:
        found.finish()
