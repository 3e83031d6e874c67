"""Checkpoints in the store: another machine resumes from them, and damaged ones are skipped."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.checkpoint_records import FORMAT
from flows.artifacts.checkpoints import (
    commit_of,
    find_steps,
    forget,
    is_whole,
    prune,
    restore,
    restore_step,
    send,
    settle,
)
from flows.identity.records import decode_record, encode_record
from flows.identity.ref import ArtifactRef
from infra.storage.base import StoreUnavailable
from infra.storage.local import LocalStore
from nanochat_core.errors import StageError
from nanochat_core.job import CHECKPOINT_FORMAT, Job
from tests.support.infra.storage.owners import own_as_user, path_of
from tests.support.small_job import small_job


def make_job(directory: Path) -> Job:
    directory.mkdir(parents=True)
    return small_job(directory, fingerprint="ab" * 32)


def save(job: Job, step: int) -> Path:
    """What the worker leaves for one step."""
    directory = job.checkpoints / f"step-{step:07d}"
    directory.mkdir(parents=True)
    data = f"weights {step}".encode() * 1000
    (directory / "tensors.safetensors").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    commit = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "total": 900,
        "files": {"tensors.safetensors": entry},
        "state": {"row": step, "loss": 0.1},
    }
    (directory / "COMMIT.json").write_text(json.dumps(commit))
    with job.events.open("a") as file:
        file.write(f'{{"kind": "step", "step": {step}}}\n')
    return directory


def send_one(store: LocalStore, job: Job, step: int, *, epoch: int = 1) -> None:
    sent = send(
        store, job, save(job, step), owner="me", fencing_token=epoch, check_lease=lambda: None
    )
    prune(store, job, sent=sent)


@pytest.fixture
def here(tmp_path: Path) -> Job:
    return make_job(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Job:
    return make_job(tmp_path / "there")


def steps_of(job: Job) -> list[str]:
    return sorted(path.name for path in job.checkpoints.glob("*"))


def test_another_machine_resumes_from_the_newest(store, here, there):
    for step in (100, 200):
        send_one(store, here, step)
    logged: list[str] = []
    restore(store, there, log=logged.append)
    assert logged == ["fetching checkpoint step 200/900 from the store"]
    assert steps_of(there) == ["step-0000200"]
    fetched, sent = (job.checkpoints / "step-0000200" for job in (there, here))
    assert commit_of(fetched) == commit_of(sent)
    assert is_whole(fetched)
    assert there.events.read_text() == here.events.read_text()
    there.events.open("a").close()  # the job may write to it


def test_what_a_resumed_job_logs_does_not_change_the_stored_checkpoint(
    store, here, there, monkeypatch
):
    send_one(store, here, 100)
    own_as_user(path_of(store, ""), monkeypatch)  # a fetch makes hard links
    restore(store, there, log=lambda text: None)
    tensors = there.checkpoints / "step-0000100" / "tensors.safetensors"
    assert [path.stat().st_nlink for path in (there.events, tensors)] == [1, 2]
    with there.events.open("a") as file:
        file.write('{"kind": "step", "step": 101}\n')
    third = make_job(there.directory.parent / "third")
    restore(store, third, log=lambda text: None)
    assert steps_of(third) == ["step-0000100"]


def test_a_job_with_a_newer_one_of_its_own_fetches_nothing(store, here, there):
    send_one(store, here, 100)
    save(there, 150)
    restore(store, there, log=pytest.fail)
    assert steps_of(there) == ["step-0000150"]


def test_a_newer_one_of_its_own_that_is_damaged_does_not_count(store, here, there):
    send_one(store, here, 100)
    (save(there, 150) / "tensors.safetensors").write_bytes(b"half")
    restore(store, there, log=lambda text: None)
    assert steps_of(there) == ["step-0000100", "step-0000150"]
    assert is_whole(there.checkpoints / "step-0000100")


def place_of(store: LocalStore, job: Job, step: int) -> str:
    """Where the one attempt at a step lies."""
    (place,) = {
        entry.key.rpartition("/")[0]
        for entry in store.list(f"pretrain/{job.fingerprint}/checkpoints/step-{step:07d}/")
    }
    return place


def record_of(store: LocalStore, job: Job, step: int) -> tuple[str, dict[str, Any]]:
    """Key and content of the record of the one attempt at a step."""
    key = f"{place_of(store, job, step)}/COMMIT.json"
    return key, decode_record(store.get(key), format=FORMAT, where=key)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "commit"])
def test_a_damaged_one_is_passed_over_and_stays_and_the_step_may_be_sent_again(
    store, here, there, damage
):
    for step in (100, 200):
        send_one(store, here, step)
    place = place_of(store, here, 200)
    key = f"{place}/tensors.safetensors"
    data = bytearray(store.get(key))
    if damage == "flip":
        data[500] ^= 4
        store.put(key, bytes(data))
    elif damage == "truncate":
        store.put(key, bytes(data[:-1]))
    elif damage == "delete":
        store.delete(key)
    else:
        store.put(f"{place}/COMMIT.json", b'{"format": 3}')
    logged: list[str] = []
    restore(store, there, log=logged.append)
    assert any("step 200 in the store is damaged and is passed over" in text for text in logged)
    assert steps_of(there) == ["step-0000100"]
    assert store.head(f"{place}/COMMIT.json").size  # perhaps this machine's disk is at fault
    send_one(store, there, 200, epoch=2)  # the same step, done again
    third = make_job(there.directory.parent / "third")
    restore(store, third, log=lambda text: None)
    assert steps_of(third) == ["step-0000200"]
    assert is_whole(third.checkpoints / "step-0000200")


def test_sending_again_leaves_what_was_committed_alone(store, here, there):
    directory = save(here, 100)
    for _ in range(2):  # the answer to the first was lost, say
        send(store, here, directory, owner="me", fencing_token=1, check_lease=lambda: None)
        with here.events.open("a") as file:
            file.write('{"kind": "message", "text": "and on"}\n')
    logged: list[str] = []
    restore(store, there, log=logged.append)
    assert logged == ["fetching checkpoint step 100/900 from the store"]


def test_a_commit_that_would_leave_its_directory_is_refused(store, here, there):
    send_one(store, here, 100)
    key, tree = record_of(store, here, 100)
    tree["files"][0]["path"] = "../../evil"
    store.put(key, encode_record(tree, format=FORMAT))
    logged: list[str] = []
    restore(store, there, log=logged.append)
    assert "passed over" in logged[0]
    assert not list(there.directory.parent.rglob("evil"))


def test_a_fence_that_falls_while_files_are_sent_stops_the_commit(store, here):
    asked: list[int] = []

    def check_lease() -> None:
        asked.append(len(list(store.list("pretrain/"))))
        if len(asked) == 2:
            raise StageError("another one has it")

    with pytest.raises(StageError):
        send(store, here, save(here, 100), owner="me", fencing_token=1, check_lease=check_lease)
    assert asked == [0, 2]  # before anything, and after the tensors and the events
    assert find_steps(store, ArtifactRef("pretrain", here.fingerprint)) is None


def test_a_removal_that_is_cut_off_leaves_no_checkpoint_without_its_files(tmp_path, here):
    class Dying(LocalStore):
        def delete(self, key: str) -> None:
            super().delete(key)
            raise StoreUnavailable("no answer", hint="wait")

    store, ref = Dying(tmp_path / "store"), ArtifactRef("pretrain", here.fingerprint)
    send_one(store, here, 100)
    with pytest.raises(StoreUnavailable):
        forget(store, ref)
    assert find_steps(store, ref) is None
    again = LocalStore(tmp_path / "store")
    forget(again, ref)
    assert list(again.list("pretrain/")) == []


def test_later_steps_that_were_passed_over_do_not_crowd_out_new_ones(store, here, there):
    for step in (700, 800):
        send_one(store, here, step)
    for commit in path_of(store, here.stage).rglob("COMMIT.json"):
        commit.chmod(0o644)
        commit.write_text("of a format that no version reads")
    for step in (100, 200, 300):
        send_one(store, there, step)
    places = {entry.key.split("/")[3] for entry in store.list("pretrain/")}
    assert places == {f"step-0000{step}" for step in (200, 300, 700, 800)}
    logged: list[str] = []
    third = make_job(there.directory.parent / "third")
    restore(store, third, log=logged.append)
    assert [d.name for d in third.checkpoints.glob("step-*")] == ["step-0000300"]
    assert sum("passed over" in text for text in logged) == 2


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


ANOTHER_FORMAT = r"step-0000100.* is of format \d+, this version reads \d+"


LOOKS: dict[str, Callable[[LocalStore, Job], object]] = {
    "restore": lambda store, job: restore(store, job, log=pytest.fail),
    "restore_step": lambda store, job: restore_step(
        store, job, 100, commit="c0ffee", log=pytest.fail
    ),
    "settle": lambda store, job: settle(job),
}


@pytest.mark.parametrize("use", LOOKS)
def test_a_local_checkpoint_of_another_format_is_refused_and_stays(store, here, there, use):
    send_one(store, here, 100)
    committed = save(there, 100) / "COMMIT.json"
    committed.write_text('{"format": 7, "shards": ["in another layout"]}')
    before = contents(there.checkpoints)
    with pytest.raises(StageError, match=ANOTHER_FORMAT) as caught:
        LOOKS[use](store, there)
    assert "--force" in str(caught.value.hint)
    assert contents(there.checkpoints) == before


@pytest.mark.parametrize("part", ["record", "commit"])
def test_a_stored_checkpoint_of_another_format_is_refused_and_stays(store, here, there, part):
    for step in (100, 200):  # the older one: nothing may prune it
        send_one(store, here, step)
    key, tree = record_of(store, here, 100)
    tree["commit"]["format"] += part == "commit"
    store.put(key, encode_record(tree, format=FORMAT + (part == "record")))
    before = contents(path_of(store, "pretrain"))
    with pytest.raises(StageError, match=ANOTHER_FORMAT) as caught:
        restore(store, there, log=pytest.fail)
    assert "--force" in str(caught.value.hint)
    assert contents(path_of(store, "pretrain")) == before
    assert steps_of(there) == []
