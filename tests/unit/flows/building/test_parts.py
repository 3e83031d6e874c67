"""Checkpoint files of other nodes travel through the store, and are sent once."""

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flows.artifacts.checkpoints import (
    commit_of,
    is_stored,
    is_whole,
    prune,
    restore,
    restore_step,
    send,
    settle,
)
from flows.building.checkpoint_shards import file_of, note_shard, uploading_shards
from flows.building.coordinator import Coordinator, NodeLost, _Peer
from flows.building.messages import CheckpointShard, Start, Status
from flows.identity.manifest import File
from flows.leases.held_lease import LeaseTimings
from infra.storage.base import OnBytes, StoreUnavailable
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, NanochatError
from nanochat_core.job import Job
from tests.support.flows.waiting import wait_until
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
    return send(
        store, job, directory, owner="me", fencing_token=1, check_lease=lambda: None, **options
    )


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[Job, Job]:
    """One fingerprint on two machines."""
    return make_job(tmp_path / "a"), make_job(tmp_path / "b")


def upload(store: LocalStore, job: Job, *, epoch: int = 1) -> list[CheckpointShard]:
    """What node 0 hears when node 1 has uploaded what rank 1 wrote."""
    heard: list[CheckpointShard] = []
    errors: list[NanochatError] = []
    with uploading_shards(
        store, job, [1], epoch=epoch, on_shard=heard.append, on_error=errors.append
    ):
        pass
    assert not errors
    return heard


def test_the_files_of_another_node_go_to_the_store_alone(store, jobs):
    a, b = jobs
    write(a, 5, 0)
    write(b, 5, 1)
    (shard,) = upload(store, b, epoch=3)
    assert (shard.step, shard.rank) == (5, 1)
    file = file_of(b, shard, epoch=3)
    assert "/step-0000005/parts-3/" in file.key
    assert not list(b.checkpoints.glob("step-*/*"))  # of no use there any more
    assert upload(store, b) == []
    note_shard(a, shard)
    directory = commit(a, 5, 2)
    before = {entry.key for entry in store.list("") if entry.key.endswith(".safetensors")}
    send_whole(store, a, directory, there=[file])
    after = {entry.key for entry in store.list("") if entry.key.endswith(".safetensors")}
    assert len(after - before) == 1  # rank 0's own
    assert not (directory / file.path).exists()
    shutil.rmtree(b.checkpoints)
    for job in jobs:  # node 0 too has to fetch it, when it resumes
        restore(store, job, log=lambda text: None)
        assert is_whole(job.checkpoints / directory.name)


def test_a_part_of_a_checkpoint_is_removed_when_nothing_can_complete_it(store, jobs):
    a, b = jobs
    send_whole(store, a, save_alone(a, 2))
    write(a, 5, 0)
    write(b, 5, 1)
    (shard,) = upload(store, b)
    note_shard(a, shard)
    commit(a, 5, 2)  # and node 0 is killed before it is sent
    restore(store, a, log=lambda text: None)
    assert [path.name for path in a.checkpoints.glob("*step-*")] == ["step-0000002"]


def test_equal_files_of_another_step_are_sent_again(store, jobs):
    a, _ = jobs
    write(a, 5, 0)
    directory = commit(a, 5, 1)
    (name,) = (path.name for path in directory.glob("*.safetensors"))
    size, sha256 = json.loads((directory / "COMMIT.json").read_text())["files"][name].values()
    older = File(path=name, size=size, sha256=sha256, key="pretrain/x/checkpoints/step-0000004/a")
    send_whole(store, a, directory, there=[older])
    shutil.rmtree(directory)
    restore(store, a, log=lambda text: None)  # though step 4 is not in the store
    assert is_whole(directory)


def test_a_shard_is_given_up_when_the_ranks_begin_the_next_save(store, jobs, monkeypatch):
    _, b = jobs
    write(b, 5, 1)
    real = store.upload

    def slow_upload(key: str, path: Path, *, on_bytes: OnBytes) -> None:
        write(b, 9, 1)
        on_bytes(1)
        real(key, path, on_bytes=on_bytes)

    monkeypatch.setattr(store, "upload", slow_upload)
    assert upload(store, b) == []
    assert [shard.step for shard in upload(store, b)] == [9]


def test_a_shard_that_the_store_did_not_take_is_reported_and_sent_later(store, jobs, monkeypatch):
    _, b = jobs
    heard: list[CheckpointShard] = []
    errors: list[NanochatError] = []
    with uploading_shards(store, b, [1], epoch=7, on_shard=heard.append, on_error=errors.append):
        with monkeypatch.context() as patch:
            patch.setattr(store, "upload", Mock(side_effect=StoreUnavailable("no answer")))
            write(b, 9, 1)
            wait_until(lambda: errors)
        assert heard == []
    assert [shard.step for shard in heard] == [9]


def make_coordinator(job: Job) -> Coordinator:
    start = Start(epoch=1, host="a", nodes=2, processes=1, step=0, commit="", device_batch_size=1)
    unused: Any = None  # shards need no lease and no stop
    return Coordinator(job, start, unused, unused, LeaseTimings(), lambda text: None)


def test_a_node_is_admitted_until_the_ranks_start_and_lost_until_it_has_ended(jobs):
    coordinator = make_coordinator(jobs[0])
    link: Any = None

    def admits(node: int) -> bool:
        return coordinator._admit(link, Status(node=node, host="b", state="coming")) is not None

    assert [admits(node) for node in (0, 2, 1)] == [False, False, True]
    peer = coordinator._peers[1]
    peer.lost = "is gone"
    assert "node 1, b, is gone" in str(coordinator._errors())
    peer.status = replace(peer.status, state="ended")
    assert coordinator._errors() == []
    coordinator.start = replace(coordinator.start, endpoint="a:1")
    assert not admits(1)


def test_ranks_do_not_start_without_a_node_that_is_lost_at_the_last_moment(jobs):
    coordinator = make_coordinator(jobs[0])
    coordinator.terms = LeaseTimings(meet=0.0)
    coordinator.stop, coordinator.lease = threading.Event(), Mock()
    peer = _Peer(link=Mock(), status=Status(node=1, host="b", state="ready"))
    coordinator._peers[1] = peer
    lock = coordinator._lock

    @contextlib.contextmanager
    def late() -> Iterator[None]:
        """The lock, as it is free once node 1 has been lost."""
        coordinator._lock = lock
        coordinator._lose(peer, "is gone")
        with lock:
            yield

    coordinator._lock = late()
    with pytest.raises(NodeLost, match="node 1 did not come"):
        coordinator.assemble("127.0.0.1")


def test_a_checkpoint_is_sent_after_a_part_of_a_later_one_came(store, jobs):
    a, b = jobs
    coordinator = make_coordinator(a)
    for step in (5, 9):
        write(a, step, 0)
        write(b, step, 1)
        (shard,) = upload(store, b)
        coordinator.note(shard)
    directory = commit(a, 5, 2)
    send_whole(store, a, directory, there=coordinator.shards(5))
    restore(store, b, log=lambda text: None)
    assert is_whole(b.checkpoints / directory.name)
    directory = commit(a, 9, 2)
    send_whole(store, a, directory, there=coordinator.shards(9))
    restore(store, b, log=lambda text: None)
    assert is_whole(b.checkpoints / directory.name)


def test_parts_of_steps_that_were_never_committed_go(store, jobs):
    a, b = jobs
    for step in (3, 9):
        write(b, step, 1)
    upload(store, b)
    for step in (4, 5, 6):
        sent = send_whole(store, a, save_alone(a, step))
        prune(store, a, sent=sent)
    steps = {entry.key.split("/")[3] for entry in store.list("pretrain/")}
    assert steps == {"step-0000005", "step-0000006", "step-0000009"}


def test_a_node_has_exactly_the_checkpoint_that_was_called(store, jobs):
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


def test_a_checkpoint_of_the_same_step_with_other_contents_is_not_taken(store, jobs):
    a, b = jobs
    write(a, 4, 0)
    directory = commit(a, 4, 1)
    sent = commit_of(directory)
    send_whole(store, a, directory)
    write(b, 4, 0, text="another attempt's")
    other = commit(b, 4, 1)
    assert not is_stored(store, b, other)
    with pytest.raises(ArtifactError, match="step 4 is not in"):
        restore_step(store, a, 4, commit=commit_of(other), log=lambda text: None)
    for entry in list(store.list("pretrain/")):
        if entry.key.endswith(".safetensors"):
            store.put(entry.key, bytes(entry.size))
    with pytest.raises(ArtifactError) as caught:
        restore_step(store, b, 4, commit=sent, log=lambda text: None)
    assert "node 0 sends it again" in (caught.value.hint or "")


def test_node_0_settles_on_its_newest_whole_checkpoint(jobs):
    a, _ = jobs
    assert settle(a) is None
    for step in (1, 2, 3):
        save_alone(a, step)
    (a.checkpoints / "step-0000003" / "tensors.safetensors").write_bytes(b"torn")
    (a.checkpoints / "step-0000004").mkdir()
    newest = settle(a)
    assert newest.name == "step-0000002"
    names = sorted(path.name for path in a.checkpoints.iterdir())
    assert names == ["aside-step-0000003", "step-0000001", "step-0000002"]
