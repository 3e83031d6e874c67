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


def test_a_file_in_place_of_the_directory_is_refused(terminal, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("mine")
    for target in (readme, readme / "below"):
        error, hint = terminal.fails("infra", "compose", str(target))
        assert error == f"{readme} is not a directory"
        assert "another directory" in hint
    assert readme.read_text() == "mine"


@pytest.mark.parametrize("words", [(), ("--force",)])
def test_a_directory_in_place_of_a_file_is_refused(words, terminal, tmp_path):
    target = tmp_path / "target"
    (target / "compose.yaml").mkdir(parents=True)
    error, hint = terminal.fails("infra", "compose", str(target), *words)
    assert error == f"{target / 'compose.yaml'} is not a file"
    assert "another directory" in hint
    assert [path.name for path in target.iterdir()] == ["compose.yaml"]


def test_a_file_in_place_of_a_folder_is_refused_before_anything_is_written(terminal, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "jobset").touch()
    error, _ = terminal.fails("infra", "kubernetes", str(target))
    assert error == f"{target / 'jobset'} is not a directory"
    assert [path.name for path in target.iterdir()] == ["jobset"]


def test_a_file_that_differs_is_replaced_only_with_force(terminal, tmp_path):
    terminal.said("infra", "slurm", str(tmp_path))
    script = tmp_path / "run.sbatch"
    original = script.read_bytes()
    script.write_text("mine")
    (tmp_path / "stage.sbatch").unlink()

    error, hint = terminal.fails("infra", "slurm", str(tmp_path))
    assert error == f"{tmp_path} has other contents in run.sbatch"
    assert "--force" in hint
    assert script.read_text() == "mine"
    assert not (tmp_path / "stage.sbatch").exists()

    lines = terminal.said("infra", "slurm", str(tmp_path), "--force")
    assert [line.split()[0] for line in lines] == ["replaced", "written"]
    assert script.read_bytes() == original
    assert terminal.said("infra", "slurm", str(tmp_path))[0].split()[0] == "unchanged"


def test_an_unknown_kind_is_refused_with_those_that_exist(terminal, tmp_path):
    error, hint = terminal.fails("infra", "nomad", str(tmp_path), code=2)
    assert "nomad" in error
    assert "systemd" in error + hint
