"""`nanochat infra`: every file of a kind, and none of the user's own replaced in silence."""


def test_every_file_of_a_kind_is_written_and_named(terminal, tmp_path):
    for kind in ("compose", "systemd", "kubernetes", "skypilot"):
        terminal.shows("infra", kind, str(tmp_path / kind))


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
