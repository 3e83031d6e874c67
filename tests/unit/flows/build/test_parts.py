"""Checkpoint files of other nodes travel through the store, and are sent once."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.checkpoints import (
    commit_of,
    is_stored,
    prune,
    restore,
    restore_step,
    send,
    settle,
)
from flows.build.checkpoint_shards import (
    CheckpointShard,
    gather_shards,
    upload_shards,
    uploading_shards,
)
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, NanochatError
from nanochat_core.job import Job
from tests.unit.flows.artifacts.test_checkpoints import make_job
from tests.unit.flows.artifacts.test_checkpoints import save as save_alone


def write(job: Job, step: int, rank: int, *, text: str = "state") -> None:
    """What a rank leaves of a checkpoint."""
    directory = job.checkpoints / f"step-{step:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    data = f"{text} {step} of {rank}".encode()
    (directory / f"tensors-{rank:05d}.safetensors").write_bytes(data)
    record = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / f"tensors-{rank:05d}.json").write_text(json.dumps(record))


def commit(job: Job, step: int, ranks: int) -> Path:
    """What rank 0 does when all files are there."""
    directory = job.checkpoints / f"step-{step:07d}"
    records = [directory / f"tensors-{rank:05d}.json" for rank in range(ranks)]
    files = {f"{path.stem}.safetensors": json.loads(path.read_text()) for path in records}
    tree = {"format": 2, "step": step, "total": 900, "files": files, "state": {}}
    (directory / "COMMIT.json").write_text(json.dumps(tree))
    for record in records:
        record.unlink()
    return directory


def send_whole(store: LocalStore, job: Job, directory: Path, **options: Any) -> int:
    return send(store, job, directory, owner="me", fencing_token=1, fence=lambda: None, **options)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[Job, Job]:
    """One fingerprint on two machines."""
    return make_job(tmp_path / "a"), make_job(tmp_path / "b")


def test_the_files_of_another_node_come_home_and_are_sent_once(
    store: LocalStore, jobs: tuple[Job, Job]
) -> None:
    a, b = jobs
    write(a, 5, 0)
    write(b, 5, 1)
    assert gather_shards(store, a, [1], epoch=1) == []
    assert [part.step for part in upload_shards(store, b, [1], epoch=1)] == [5]
    assert not list(b.checkpoints.glob("step-*/*"))  # of no use there any more
    parts = gather_shards(store, a, [1], epoch=1)
    assert [(part.step, part.file.path) for part in parts] == [(5, "tensors-00001.safetensors")]
    directory = commit(a, 5, 2)
    assert gather_shards(store, a, [1], epoch=1) == []
    before = {entry.key for entry in store.list("") if entry.key.endswith(".safetensors")}
    send_whole(store, a, directory, there=[part.file for part in parts])
    after = {entry.key for entry in store.list("") if entry.key.endswith(".safetensors")}
    assert len(after - before) == 1  # rank 0's own
    shutil.rmtree(b.checkpoints)
    restore(store, b, log=lambda text: None)
    assert commit_of(b.checkpoints / directory.name) == commit_of(directory)


def test_a_part_with_other_bytes_is_sent_again(store: LocalStore, jobs: tuple[Job, Job]) -> None:
    a, b = jobs
    write(b, 5, 1, text="other state")
    upload_shards(store, b, [1], epoch=1)
    write(a, 5, 0)
    (part,) = gather_shards(store, a, [1], epoch=1)
    write(a, 5, 1)
    directory = commit(a, 5, 2)
    send_whole(store, a, directory, there=[part.file])
    shutil.rmtree(directory)
    restore(store, a, log=lambda text: None)
    assert (directory / "tensors-00001.safetensors").read_text() == "state 5 of 1"


def test_parts_of_an_earlier_attempt_are_not_looked_at(
    store: LocalStore, jobs: tuple[Job, Job]
) -> None:
    a, b = jobs
    write(b, 5, 1)
    upload_shards(store, b, [1], epoch=1)
    write(a, 5, 0)
    assert gather_shards(store, a, [1], epoch=2) == []


def test_a_part_that_is_damaged_is_not_taken(store: LocalStore, jobs: tuple[Job, Job]) -> None:
    a, b = jobs
    write(b, 5, 1)
    (part,) = upload_shards(store, b, [1], epoch=1)
    store.put(part.file.key, b"x" * part.file.size)
    write(a, 5, 0)
    with pytest.raises(ArtifactError, match="sha256"):
        gather_shards(store, a, [1], epoch=1)
    directory = a.checkpoints / "step-0000005"
    assert sorted(path.name for path in directory.iterdir()) == [
        "tensors-00000.json",
        "tensors-00000.safetensors",
    ]


def test_what_is_written_last_is_sent_before_the_block_ends(
    store: LocalStore, jobs: tuple[Job, Job]
) -> None:
    a, b = jobs
    told: list[NanochatError] = []
    with uploading_shards(store, b, [1], epoch=7, on_error=told.append):
        write(b, 9, 1)
    write(a, 9, 0)
    (part,) = gather_shards(store, a, [1], epoch=7)
    assert isinstance(part, CheckpointShard)
    assert told == []


def test_parts_of_steps_that_were_never_committed_go(
    store: LocalStore, jobs: tuple[Job, Job]
) -> None:
    a, b = jobs
    for step in (3, 9):
        write(b, step, 1)
    upload_shards(store, b, [1], epoch=1)
    for step in (4, 5, 6):
        sent = send_whole(store, a, save_alone(a, step))
        prune(store, a, sent=sent)
    steps = {entry.key.split("/")[3] for entry in store.list("pretrain/")}
    assert steps == {"step-0000005", "step-0000006", "step-0000009"}


def test_a_node_has_exactly_the_checkpoint_that_was_called(
    store: LocalStore, jobs: tuple[Job, Job]
) -> None:
    a, b = jobs
    for step in (2, 4, 6):
        send_whole(store, a, save_alone(a, step))
        save_alone(b, step + 1)
    (b.checkpoints / "step-0000008").mkdir()  # was being saved
    wanted = commit_of(a.checkpoints / "step-0000004")
    for _ in range(2):  # the second time it is there
        restore_step(store, b, 4, commit=wanted, log=lambda text: None)
        names = sorted(path.name for path in b.checkpoints.iterdir())
        assert names == ["aside-step-0000005", "aside-step-0000007", "step-0000004"]
    restore_step(store, b, 0, commit="", log=lambda text: None)
    assert not list(b.checkpoints.glob("step-*"))


def test_a_checkpoint_of_the_same_step_with_other_contents_is_not_taken(
    store: LocalStore, jobs: tuple[Job, Job]
) -> None:
    a, b = jobs
    write(a, 4, 0)
    send_whole(store, a, commit(a, 4, 1))
    write(b, 4, 0, text="another attempt's")
    other = commit(b, 4, 1)
    assert not is_stored(store, b, other)
    with pytest.raises(ArtifactError, match="step 4 is not in"):
        restore_step(store, a, 4, commit=commit_of(other), log=lambda text: None)


def test_node_0_settles_on_its_newest_whole_checkpoint(jobs: tuple[Job, Job]) -> None:
    a, _ = jobs
    assert settle(a) is None
    for step in (1, 2, 3):
        save_alone(a, step)
    (a.checkpoints / "step-0000003" / "tensors.safetensors").write_bytes(b"torn")
    (a.checkpoints / "step-0000004").mkdir()
    newest = settle(a)
    assert newest is not None
    assert newest.name == "step-0000002"
    names = sorted(path.name for path in a.checkpoints.iterdir())
    assert names == ["aside-step-0000003", "step-0000001", "step-0000002"]
