"""`nanochat infra`: every file of a kind, and none of the user's own replaced in silence."""

from pathlib import Path

import pytest

from tests.support.infra.deployed import INFRA

FOLDERS = {
    "compose": "containers",
    "systemd": "systemd",
    "slurm": "slurm",
    "kubernetes": "kubernetes",
    "skypilot": "skypilot",
}
OF_A_CHECKOUT = {"Dockerfile", "Dockerfile.dockerignore"}
FILLED_IN = {"secrets.yaml", "secrets.yaml~", "stack.env", "nanochat.env"}


def files_in(folder: Path) -> dict[str, bytes]:
    """Path below the folder -> content, without code and passwords."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in files
        if path.suffix not in (".py", ".pyc") and path.name not in OF_A_CHECKOUT | FILLED_IN
    }


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_file_is_written_and_named(kind, terminal, tmp_path):
    target = tmp_path / "made" / "here"
    lines = terminal.said("infra", kind, str(target))

    assert files_in(target) == files_in(INFRA / FOLDERS[kind])
    assert {line.split()[1] for line in lines} == {str(target / name) for name in files_in(target)}
    assert {line.split()[0] for line in lines} == {"written"}


def test_what_is_in_the_way_is_refused(terminal, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "a" / "compose.yaml").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "jobset").touch()
    for words in (
        *("compose {}/README.md", "compose {}/README.md/below", "kubernetes {}/b"),
        *("compose {}/a", "compose {}/a --force"),
    ):
        terminal.refuses(f"infra {words.format(tmp_path)}")
    terminal.refuses(f"infra nomad {tmp_path}", code=2)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_file_that_differs_is_replaced_only_with_force(terminal, tmp_path):
    words = ("infra", "slurm", str(tmp_path / "target"))
    terminal.shows(*words)
    script, other = (tmp_path / "target" / f"{name}.sbatch" for name in ("run", "stage"))
    original = script.read_bytes()
    script.write_text("mine")
    other.unlink()
    terminal.refuses(*words)
    assert (script.read_text(), other.exists()) == ("mine", False)
    terminal.shows(*words, "--force")
    assert script.read_bytes() == original
    terminal.shows(*words)
