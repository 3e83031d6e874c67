"""Records of any other format, earlier or later, are refused by their number."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.artifacts import checkpoint_records, revocations, runs
from flows.artifacts.publish import find_manifest
from flows.identity import manifest
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StageError
from nanochat_core.job import Result, write_json
from nanochat_core.runtime.process_start import ProcessRef, this_process

FINGERPRINT = "c6644c34043bc6eb21664656a83a895c5557d55eac6aea15fbc6538a7c29a1e4"
FORMATS = {  # of the kinds of records, by key
    f"eval/{FINGERPRINT}/manifest.json": manifest.FORMAT,
    "runs/tiny-1-a.json": runs.FORMAT,
    f"eval/{FINGERPRINT}/checkpoints/step-0000100/1/COMMIT.json": checkpoint_records.FORMAT,
    f"eval/{FINGERPRINT}/lease.json": lease.FORMAT,
    f"eval/{FINGERPRINT}/revoked.json": revocations.FORMAT,
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


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


@pytest.mark.parametrize(("change", "hint"), [(-1, "another version"), (1, "update")])
@pytest.mark.parametrize("key", FORMATS)
def test_a_record_of_another_format_is_refused_by_its_number(store, key, change, hint):
    ref, number = ArtifactRef("eval", FINGERPRINT), FORMATS[key] + change
    store.put(key, encode_record({"news": 1}, format=number))
    read: dict[str, Callable[[], object]] = {
        "manifest.json": lambda: find_manifest(store, ref),
        "tiny-1-a.json": lambda: runs.find_run(store, "tiny-1-a"),
        "COMMIT.json": lambda: checkpoint_records.open_record(store, key.rpartition("/")[0]),
        "lease.json": lambda: lease.find_holder(store, ref),
        "revoked.json": lambda: revocations.find_revocation(store, ref),
    }

    with pytest.raises(ArtifactError, match=f"is of format {number}, this version reads") as caught:
        read[key.rpartition("/")[2]]()

    assert "\n" not in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert "delete" not in (caught.value.hint or "")


def test_a_file_that_names_a_process_in_another_format_names_none(tmp_path):
    path, me = tmp_path / "lock", this_process()
    with path.open("a") as file:
        me.write(file)
    assert ProcessRef.find(path) == me

    for text in ("", "[]", json.dumps(asdict(me)), json.dumps({"format": 2, **asdict(me)})):
        path.write_text(text)
        assert ProcessRef.find(path) is None
