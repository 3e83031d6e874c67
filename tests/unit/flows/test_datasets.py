import json

import pytest

from flows.identity.fingerprint import REPOSITORY, Code, identify
from flows.profiles import open_profile
from flows.stages import stage_named
from nanochat_core.errors import ConfigError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TINY = open_profile("tiny").run


def write(path, *talks):
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


def opened(*datasets):
    """Return the tiny run with these datasets in addition to its own."""
    entries = [*(dataset.tree() for dataset in TINY.task_data.datasets), *datasets]
    override = f"task_data.datasets={json.dumps(entries)}"
    return open_profile("tiny", overrides=[override]).run


def own(path, **changes):
    return {"name": "letters", "grade": 1, "num_train": None, "num_test": None} | {
        "path": str(path),
        **changes,
    }


def fingerprint(run):
    return identify(stage_named("task_data"), run, {}, code=Code(REPOSITORY)).fingerprint


def test_what_a_file_holds_is_identity_and_where_it_lies_is_not(tmp_path):
    one = opened(own(write(tmp_path / "one.jsonl", TALK)))
    assert one.task_data.datasets[-1].path == str(tmp_path / "one.jsonl")
    (tmp_path / "elsewhere").mkdir()
    moved = opened(own(write(tmp_path / "elsewhere" / "two.jsonl", TALK)))
    grown = opened(own(write(tmp_path / "one.jsonl", TALK, TALK)))
    before, same, after = (fingerprint(run) for run in (one, moved, grown))
    assert before == same != after


def test_a_path_may_be_relative_or_begin_at_home(tmp_path, monkeypatch):
    write(tmp_path / "letters.jsonl", TALK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("letters.jsonl", "~/letters.jsonl"):
        assert opened(own(path)).task_data.datasets[-1].path == str(tmp_path / "letters.jsonl")


def test_a_snapshot_that_is_given_must_be_that_of_the_file(tmp_path):
    path = write(tmp_path / "letters.jsonl", TALK)
    snapshot = opened(own(path)).task_data.datasets[-1].snapshot
    assert opened(own(path, snapshot=snapshot)).task_data.datasets[-1].snapshot == snapshot
    write(path, TALK, TALK)
    with pytest.raises(ConfigError, match=f"should have sha256 {snapshot[:12]}, {path} has ") as e:
        opened(own(path, snapshot=snapshot))
    assert "leave its snapshot out" in (e.value.hint or "")


def test_a_machine_without_the_file_can_plan_by_its_snapshot(tmp_path):
    path = write(tmp_path / "letters.jsonl", TALK)
    before = opened(own(path))
    path.unlink()
    after = opened(own(path, snapshot=before.task_data.datasets[-1].snapshot))
    assert fingerprint(after) == fingerprint(before)


def test_a_dataset_that_cannot_be_is_refused_when_the_run_is_planned(tmp_path, transcript):
    path = write(tmp_path / "letters.jsonl", TALK)
    for changes in (
        *({"path": None}, {"path": "/nowhere.jsonl"}, {"path": "/tmp"}, {"name": "mmlu"}),
        {"name": "mmlu", "path": None, "snapshot": "x"},
        {"revision": "main"},
        {"name": "spelling_bee", "path": None, "revision": "x"},
        {"name": "simple_spelling", "path": None},
    ):
        transcript.refused(str(changes), ConfigError, opened, own(path) | changes)
