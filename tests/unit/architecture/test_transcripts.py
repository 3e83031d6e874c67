"""Files under tests/transcripts belong to tests: see tests.support.transcripts."""

import ast
from pathlib import Path

import pytest

from tests.support.transcripts import FOLDER, TESTS, Transcript, path_of


def owners(folder: Path) -> set[Path]:
    """Return the transcripts that the tests of a file may have, for each folder of transcripts."""
    name = folder.relative_to(FOLDER)
    file = (TESTS / name).with_name(f"test_{name.name}.py")
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    return {path_of(file, node.name) for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_transcript_belongs_to_a_test() -> None:
    stale = [
        path
        for path in FOLDER.rglob("*.txt")
        if path.with_name(f"{path.stem.partition('-')[0]}.txt") not in owners(path.parent)
    ]
    assert stale == []


def test_a_text_that_differs_is_missing_or_is_left_over_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = "0123456789ab"

    def compare(*texts: str) -> None:
        found = Transcript(tmp_path / "folder" / "a.txt", {str(tmp_path): "TMP"})
        for text in texts:
            found.check("ls", text)
        found.finish()

    monkeypatch.delenv("UPDATE", raising=False)
    with pytest.raises(AssertionError, match="UPDATE=1"):
        compare("one")
    monkeypatch.setenv("UPDATE", "1")
    compare(f"{digest} {tmp_path}", f"{digest}{'0' * 52} 2020-01-01T00:00:00Z")
    text = (tmp_path / "folder" / "a.txt").read_text()
    assert text == ("$ ls\nid.........1 TMP\n\n$ ls\nid.........1... 2020-01-01T00:00:00Z\n")
    monkeypatch.delenv("UPDATE")
    compare(f"{'f' * 12} {tmp_path}", f"{'f' * 64} 2020-01-01T00:00:00Z")
    for wrong in ([f"{digest} elsewhere"], [f"{digest} {tmp_path}"], [f"{digest} TMP", digest]):
        with pytest.raises(AssertionError, match=r"UPDATE=1|of no command"):
            compare(*wrong)
    monkeypatch.setenv("UPDATE", "1")
    compare()
    assert not (tmp_path / "folder" / "a.txt").exists()
