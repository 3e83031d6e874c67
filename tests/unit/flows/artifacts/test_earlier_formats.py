"""Records of the format before today's are used; those of a later one are refused by their number.

The records in this file were written by the code of the version before.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts import checkpoint_records, revocations, runs
from flows.artifacts.checkpoints import find_steps
from flows.artifacts.publish import find_manifest
from flows.identity import manifest, redo
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases import held_lease, lease
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StageError
from nanochat_core.job import Result, write_json
from nanochat_core.runtime.process_start import ProcessRef, this_process
from tests.support.flows.shelf import make_manifest, put_run

FINGERPRINT = "c6644c34043bc6eb21664656a83a895c5557d55eac6aea15fbc6538a7c29a1e4"
MANIFEST: dict[str, Any] = {
    "format": 2,
    "stage": "eval",
    "fingerprint": FINGERPRINT,
    "preimage": {"stage": "eval", "format": 2, "config": {}, "inputs": {}, "code": {}},
    "files": [
        {
            "path": "a",
            "size": 1,
            "sha256": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
            "key": f"eval/{FINGERPRINT}/files/1/a",
        }
    ],
    "logs": [],
    "digest": "abf82eba3ecdd416b8fe822f1c1c2eacd4e7d1e3c26232edf774b52416888d21",
    "inputs": {},
    "provenance": {
        "run": "tiny-1-a",
        "owner": "a",
        "epoch": 1,
        "created": "2026-11-21T05:53:38Z",
        "git_commit": None,
        "metrics": {},
        "segments": [],
    },
    "divergences": [],
    "accepted": None,
    "check": "581b31099b75e7c4f127c2a31d0fa3b5f2230c907a40f470f5ae7b52778cb305",
}
LEASE: dict[str, Any] = {
    "format": 2,
    "owner": "b",
    "run": "tiny-2",
    "host": "h",
    "pid": 1,
    "home": "9d8c1cb2b3a3c6e0d8c2a1f5a3a0a6d1",
    "since": "2026-11-29T00:00:00Z",
    "epoch": 7,
    "beat": 3,
    "step": 1,
    "total": 9,
    "released": True,
    "endpoint": None,
}
RUN: dict[str, Any] = {
    "format": 4,
    "run": "tiny-1-a",
    "name": "tiny",
    "profile": "tiny",
    "depth": None,
    "overrides": [],
    "uses": [],
    "gpus": None,
    "place": [],
    "status": "finished",
    "started": "2026-11-21T05:53:38Z",
    "ended": "2026-11-21T05:54:38Z",
    "stages": {"eval": FINGERPRINT},
    "weaknesses": [],
    "check": "7c300b7af74f0673c16da070ae57cde4cf66d719bd684694a7d24496633094fc",
}
CHECKPOINT: dict[str, Any] = {
    "format": 1,
    "step": 100,
    "total": 200,
    "files": [],
    "commit": {"format": 2, "step": 100, "total": 200, "files": {}},
    "owner": "a",
    "epoch": 1,
    "check": "4bb5f78377434ab4d2db9b5c8b3ef110b2d0c139c61ab5843e65e8b5060a4c48",
}
PLACES = {
    f"eval/{FINGERPRINT}/manifest.json": MANIFEST,
    "runs/tiny-1-a.json": RUN,
    f"eval/{FINGERPRINT}/checkpoints/step-0000100/1/COMMIT.json": CHECKPOINT,
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    for key, tree in PLACES.items():
        store.put(key, json.dumps(tree).encode())
    return store


def test_an_artifact_of_the_format_before_is_found(store):
    found = find_manifest(store, ArtifactRef("eval", FINGERPRINT))

    assert found.files[0].content is None


def test_a_run_of_the_format_before_is_found_and_written_in_todays(store):
    found = runs.find_run(store, "tiny-1-a")

    assert found.stages == {"eval": FINGERPRINT}
    assert found.upstream == {}
    runs.write_run(store, found)
    assert json.loads(store.get("runs/tiny-1-a.json"))["format"] == runs.FORMAT
    assert runs.find_run(store, "tiny-1-a") == found


def test_a_checkpoint_of_the_format_before_is_found(store):
    assert find_steps(store, ArtifactRef("eval", FINGERPRINT)) == (100, 200)


def test_a_result_of_the_format_before_is_read_and_a_later_one_refused(tmp_path):
    tree = {"format": 1, "status": "finished", "metrics": {"loss": 1.0}, "modules": ["tasks.kinds"]}
    write_json(tmp_path / "result.json", tree)
    found = Result.find(tmp_path)
    assert found == Result(status="finished", metrics={"loss": 1.0})

    found.write(tmp_path)
    again = json.loads((tmp_path / "result.json").read_text())
    assert again["format"] > 1
    write_json(tmp_path / "result.json", {**again, "format": again["format"] + 1})
    with pytest.raises(StageError, match="is not of format"):
        Result.find(tmp_path)


@pytest.mark.parametrize(
    ("key", "name"), list(zip(PLACES, ("manifest", "run", "checkpoint"), strict=True))
)
def test_a_record_of_the_next_format_is_refused_by_its_number(store, key, name):
    tree = {
        field: value for field, value in PLACES[key].items() if field not in ("check", "format")
    }
    number = {"manifest": manifest, "run": runs, "checkpoint": checkpoint_records}[name].FORMAT + 1
    store.put(key, encode_record({**tree, "news": 1}, format=number))
    read: dict[str, Callable[[], object]] = {
        "manifest": lambda: find_manifest(store, ArtifactRef("eval", FINGERPRINT)),
        "run": lambda: runs.find_run(store, "tiny-1-a"),
        "checkpoint": lambda: checkpoint_records.open_record(store, key.rpartition("/")[0]),
    }

    with pytest.raises(ArtifactError, match=f"is of format {number}, this version reads") as caught:
        read[name]()

    assert "\n" not in str(caught.value)
    assert "update" in (caught.value.hint or "")
    assert "delete" not in (caught.value.hint or "")


def test_what_the_version_before_cannot_read_has_another_number(tmp_path):
    store = LocalStore(tmp_path)
    put_run(store, "tiny-2")
    records = [make_manifest("eval").to_json(), store.get("runs/tiny-2.json")]

    assert [json.loads(data)["format"] for data in records] == [4, 6]
    assert (checkpoint_records.FORMAT, lease.FORMAT) == (3, 3)
    assert (revocations.FORMAT, redo.FORMAT) == (3, 1)


def test_a_revocation_of_the_format_before_is_refused_in_a_line(store):
    """It named one build of a fingerprint, which would be another artifact today."""
    ref = ArtifactRef("eval", FINGERPRINT)
    tree = {"why": "x", "when": "2026-11-21T05:53:38Z", "who": "a@b", "owner": "a", "epoch": 1}
    store.put(ref.revocation_key, encode_record(tree, format=2))

    with pytest.raises(ArtifactError, match="is of format 2, this version reads"):
        revocations.find_revocation(store, ref)


def test_a_file_that_names_a_process_in_another_format_names_none(tmp_path):
    path, me = tmp_path / "lock", this_process()
    with path.open("a") as file:
        me.write(file)
    assert ProcessRef.find(path) == me

    for text in ("", "[]", json.dumps(asdict(me)), json.dumps({"format": 2, **asdict(me)})):
        path.write_text(text)
        assert ProcessRef.find(path) is None


def test_a_lease_that_the_version_before_held_is_taken_over(store):
    ref = ArtifactRef("eval", FINGERPRINT)
    store.put(ref.lease_key, encode_record({**LEASE, "format": 2}, format=2))

    held = held_lease.try_acquire(store, ref, lease.Lease.claim("tiny-3"))

    assert isinstance(held, held_lease.HeldLease)
    assert (held.record.epoch, held.record.endpoint) == (8, None)
