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
    ("gpu", "count", "expected"),
    [
        (None, 0, {"tiny": "fits", "evening8": "needs a GPU", "d32": "needs a GPU"}),
        ("NVIDIA GeForce RTX 4060", 1, {"evening8": "fits", "d20_seed": "too large"}),
        ("NVIDIA GeForce RTX 4090", 1, {"evening24": "fits", "d26": "too large"}),
        ("NVIDIA H100 80GB HBM3", 8, {"d26": "fits", "d32": "fits", "hour": "fits"}),
        ("GPU Z", 1, {"tiny": "fits", "d32": "needs 40.3 GB"}),
    ],
)
def test_the_list_says_which_profiles_this_machine_trains(
    gpu, count, expected, terminal, monkeypatch
):
    monkeypatch.setattr(config, "gpu_name", lambda: gpu)
    monkeypatch.setattr(config, "count_gpus", lambda: count)
    rows = [line.split("  ") for line in terminal.said("config")[1:]]
    found = {row[0]: {cell.strip() for cell in row} for row in rows}
    assert {name: text for name, text in expected.items() if text not in found[name]} == {}
