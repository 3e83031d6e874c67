"""The checkpoint format: whole or not at all, read by any number of ranks, checked before use."""

import hashlib
import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from nanochat_core.errors import ModelError, StageError
from nanochat_core.train.loop import checkpoint as checkpoint_module
from nanochat_core.train.loop.checkpoint import (
    CheckpointFacts,
    clear,
    commit,
    find_checkpoint,
    newest_step,
    prune,
    write_pieces,
)

pytestmark = pytest.mark.torch


def save(root, step, tensors, *, rank=0):
    write_pieces(clear(root, step), rank, tensors)
    commit(root / f"step-{step:07d}", facts(step))


def facts(step, *, world_size=1):
    return CheckpointFacts(
        step=step, total=9, world_size=world_size, seconds=1.5, state={"losses": []}
    )


def test_pieces_of_several_ranks_are_read_as_whole_tensors(tmp_path):
    table, matrix = torch.arange(21.0).view(7, 3), torch.randn(2, 2)
    directory = clear(tmp_path, 5)
    write_pieces(directory, 1, {"weight/table#4": table[4:], "weight/matrix": matrix})
    write_pieces(directory, 0, {"weight/table#0": table[:4], "step": torch.tensor(5)})
    assert not commit(directory, facts(5, world_size=3), lambda: True)  # rank 2's never comes
    assert find_checkpoint(tmp_path, warn=lambda text: None) is None
    assert commit(directory, facts(5, world_size=2), lambda: True)
    found = find_checkpoint(tmp_path, warn=pytest.fail)
    assert (found.step, found.world_size, found.seconds) == (5, 2, 1.5)
    assert torch.equal(found.read("weight/table"), table)
    assert torch.equal(found.read("weight/matrix"), matrix)
    assert int(found.read("step")) == 5
    with pytest.raises(ModelError, match="has no tensor weight/other"):
        found.read("weight/other")
    listed = json.loads((directory / "COMMIT.json").read_text())["files"]
    assert sorted(listed) == sorted(p.name for p in directory.iterdir() if p.suffix[1:4] == "saf")
    assert all(listed[name]["size"] == (directory / name).stat().st_size for name in listed)


def test_a_file_is_what_the_library_reads_and_what_its_hash_says(tmp_path):
    tensors = {
        "weight/b": torch.randn(3, 5),
        "weight/a": torch.randn(7).bfloat16(),
        "empty": torch.zeros(0, 4),
        "step": torch.tensor(12345678901),
        "big": torch.randn(300, 1001),
    }
    save(tmp_path, 1, tensors)
    path = tmp_path / "step-0000001" / "tensors-00000.safetensors"
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key], tensor)
    entry = json.loads((path.parent / "COMMIT.json").read_text())["files"][path.name]
    assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    save(tmp_path, 2, dict(reversed(tensors.items())))
    assert (tmp_path / "step-0000002" / path.name).read_bytes() == path.read_bytes()


def test_rank_0_commits_only_when_the_last_rank_has_written(tmp_path):
    directory = clear(tmp_path, 5)
    write_pieces(directory, 0, {"a": torch.ones(2)})
    thread = threading.Thread(target=commit, args=(directory, facts(5, world_size=2)))
    thread.start()
    time.sleep(0.2)
    assert newest_step(tmp_path) is None
    write_pieces(directory, 1, {"b": torch.ones(2)})
    thread.join(120)
    assert newest_step(tmp_path) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "commit"])
def test_a_damaged_newest_is_named_and_the_one_before_counts(tmp_path, damage):
    for step in (1, 2):
        save(tmp_path, step, {"weight/x": torch.full((100,), float(step))})
    newest = tmp_path / "step-0000002"
    path, committed = newest / "tensors-00000.safetensors", newest / "COMMIT.json"
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[-5] ^= 1
            path.write_bytes(data)
        case "cut":
            path.write_bytes(data[:-1])
        case "gone":
            path.unlink()
        case _:
            committed.write_text(committed.read_text()[:40])
    log = []
    found = find_checkpoint(tmp_path, warn=log.append)
    assert found.step == 1
    assert torch.equal(found.read("weight/x"), torch.ones(100))
    assert len(log) == 1
    assert "step-0000002 is damaged" in log[0]
    assert newest_step(tmp_path) == 1
    assert (tmp_path / "damaged-step-0000002").is_dir()
    assert find_checkpoint(tmp_path, warn=pytest.fail) is not None  # once is enough


@pytest.mark.parametrize("which", [1, 2])
def test_a_checkpoint_of_another_format_is_refused_and_stays_where_it_is(tmp_path, which):
    for step in (1, 2):
        save(tmp_path, step, {"a": torch.ones(1)})
    committed = tmp_path / f"step-000000{which}" / "COMMIT.json"
    committed.write_text(json.dumps({"format": 7, "shards": ["in another layout"]}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        StageError, match=rf"step-000000{which} is of format 7, .* reads 2"
    ) as error:
        find_checkpoint(tmp_path, warn=pytest.fail)
    assert "\n" not in str(error.value)
    assert "--force" in str(error.value.hint)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("damaged", "keep"), [((8, 9), 2), ((9,), 1), ((9,), 2)])
def test_what_is_saved_after_damage_outlives_the_damaged(tmp_path, damaged, keep):
    """Also when both are damaged: the job begins again, and gets somewhere."""
    for step in damaged:
        for _ in range(2):  # again: what was set aside before gives way
            save(tmp_path, step, {"a": torch.ones(1)})
            (tmp_path / f"step-000000{step}" / "COMMIT.json").write_text("{}")
            assert find_checkpoint(tmp_path, warn=lambda text: None) is None
    for step in (1, 2):
        save(tmp_path, step, {"a": torch.ones(1)})
        prune(tmp_path, keep=keep)
        assert newest_step(tmp_path) == step
        found = find_checkpoint(tmp_path, warn=pytest.fail)
        assert found.step == step


def test_only_rank_0_sets_aside(tmp_path):
    save(tmp_path, 1, {"a": torch.ones(1)})
    (tmp_path / "step-0000001" / "COMMIT.json").write_text("{}")
    assert find_checkpoint(tmp_path, warn=lambda text: None, rank=1, world_size=2) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


def test_a_save_that_was_killed_is_no_news_and_goes_with_the_next(tmp_path):
    save(tmp_path, 1, {"a": torch.ones(1)})
    write_pieces(clear(tmp_path, 2), 0, {"a": torch.ones(1)})
    found = find_checkpoint(tmp_path, warn=pytest.fail)
    assert found.step == 1
    write_pieces(clear(tmp_path, 4), 0, {"a": torch.ones(1)})
    save(tmp_path, 3, {"a": torch.ones(1)})
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-000000{step}" for step in (1, 3, 4)
    ]


def test_damage_that_another_rank_found_counts_for_all(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, {"a": torch.ones(1)})
    answers = iter([True, False])  # what all ranks together say of step 2, then of step 1
    log = []
    found = find_checkpoint(tmp_path, warn=log.append, any_rank=lambda mine: next(answers))
    assert found.step == 1
    assert "another rank" in log[0]


def test_what_the_disk_gives_back_otherwise_is_not_committed(tmp_path, monkeypatch):
    write = checkpoint_module._write_safetensors

    def write_wrongly(path, tensors):
        return write(path, {key: tensor + 1 for key, tensor in tensors.items()})

    monkeypatch.setattr(checkpoint_module, "_write_safetensors", write_wrongly)
    with pytest.raises(ModelError, match="gives back other values of a"):
        save(tmp_path, 1, {"a": torch.ones(3)})
    assert newest_step(tmp_path) is None
