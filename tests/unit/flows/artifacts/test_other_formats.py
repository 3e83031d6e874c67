"""Records of any other format, earlier or later, are refused by their number."""

import json
from dataclasses import asdict

import pytest

from flows.artifacts import checkpoint_records, pins, revocations, runs
from flows.artifacts.publish import find_manifest
from flows.identity import redo
from flows.identity.manifest import FORMAT
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StageError
from nanochat_core.job import Result, write_json
from nanochat_core.runtime.process_start import ProcessRef, this_process


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
def test_a_record_of_another_format_is_refused_by_its_number(tmp_path, change, hint):
    store, ref, number = LocalStore(tmp_path), ArtifactRef("eval", "a" * 64), FORMAT + change
    store.put(ref.manifest_key, encode_record({"news": 1}, format=number))
    with pytest.raises(ArtifactError, match=f"is of format {number}, this version reads") as caught:
        find_manifest(store, ref)
    assert "\n" not in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert "delete" not in (caught.value.hint or "")


def test_a_number_changes_only_with_what_is_stored_under_it():
    """Of the records in stores, which a version with another number does not read."""
    of_artifacts = (FORMAT, checkpoint_records.FORMAT, revocations.FORMAT, redo.FORMAT)
    of_runs = (runs.FORMAT, runs.TAG_FORMAT, lease.FORMAT, pins.FORMAT)
    assert (of_artifacts, of_runs) == ((4, 3, 3, 1), (6, 4, 3, 1))


def test_a_file_that_names_a_process_in_another_format_names_none(tmp_path):
    path, me = tmp_path / "lock", this_process()
    with path.open("a") as file:
        me.write(file)
    assert ProcessRef.find(path) == me

    for text in ("", "[]", json.dumps(asdict(me)), json.dumps({"format": 2, **asdict(me)})):
        path.write_text(text)
        assert ProcessRef.find(path) is None
