"""`nanochat config` writes a profile as a file, which other commands take in its place."""

import pytest

from flows.cli.train import config


def write(terminal, path, *words):
    """Write the profile that these words of `config` make."""
    text = "".join(f"{line}\n" for line in terminal.said("config", *words))
    path.write_text(text, encoding="utf-8")
    return text


def test_options_change_what_is_written_and_what_is_read(terminal, store, tmp_path):
    path = tmp_path / "my.toml"
    write(terminal, path, "tiny", "--depth", "4", "--set", "seed=7")
    path.write_text('name = "mine"\n' + path.read_text(encoding="utf-8"), encoding="utf-8")
    words = ("--depth", "4", "--set", "seed=7", "--name", "mine")
    assert terminal.read("plan", str(path)) == terminal.read("plan", "tiny", *words)
    again = terminal.read("plan", str(path), "--set", "seed=8", "--name", "other")
    assert again["run_name"] == "other"
    other = terminal.read("plan", "tiny", "--depth", "4", "--set", "seed=8")
    assert again["stages"] == other["stages"]
    tree = terminal.read("config", str(path))
    assert (tree["profile"], tree["name"], tree["depth"]) == ("tiny", "mine", 4)
    assert tree["settings"]["seed"] == 7
    assert tree["settings"]["task_data"]["core_bundle"] is None


@pytest.mark.parametrize(
    ("gpu", "count"),
    [
        (None, 0),
        ("NVIDIA GeForce RTX 4060", 1),
        ("NVIDIA GeForce RTX 4090", 1),
        ("NVIDIA H100 80GB HBM3", 8),
        ("GPU Z", 1),
    ],
)
def test_the_list_says_which_profiles_this_machine_trains(gpu, count, terminal, monkeypatch):
    monkeypatch.setattr(config, "gpu_name", lambda: gpu)
    monkeypatch.setattr(config, "count_gpus", lambda: count)
    terminal.shows("config")
