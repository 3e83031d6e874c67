"""The errors of damaged records: their hints never begin with deleting the record."""

import pytest

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import find_run
from flows.identity.manifest import FORMAT, Manifest
from flows.identity.record_types import find_record
from flows.identity.records import decode_record, encode_record, repair_hint
from flows.identity.redo import RedoCounter
from flows.identity.ref import ArtifactRef
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.shelf import make_manifest, put_run

FINGERPRINT = "a" * 64


def damaged(store: LocalStore) -> object:
    data = encode_record({"number": 1, "before": 0, "runs": []}, format=1)
    store.put("x.json", data.replace(b'"number": 1', b'"number": 3'))  # but for its checksum whole
    return find_record(store, "x.json", RedoCounter, format=1, what="a counter")


def manifest_of_other_fields(store: LocalStore) -> object:
    store.put(f"sft/{FINGERPRINT}/manifest.json", encode_record({"a": 1}, format=FORMAT))
    return find_manifest(store, ArtifactRef("sft", FINGERPRINT))


def manifest_that_contradicts_itself(store: LocalStore) -> object:
    tree = decode_record(make_manifest("sft").to_json(), format=FORMAT, where="here")
    data = encode_record({**tree, "stage": "rl"}, format=FORMAT)
    return Manifest.from_json(data, where=store.url)


def record_of_another_run(store: LocalStore) -> object:
    put_run(store, "tiny-1")
    store.put("runs/tiny-2.json", store.get("runs/tiny-1.json"))
    return find_run(store, "tiny-2")


CASES = (
    damaged,
    manifest_of_other_fields,
    manifest_that_contradicts_itself,
    record_of_another_run,
)


@pytest.mark.parametrize("read", CASES, ids=[case.__name__ for case in CASES])
def test_what_may_be_damaged_on_the_way_is_looked_at_from_elsewhere_before_it_is_deleted(
    tmp_path, read
):
    with pytest.raises(ArtifactError) as caught:
        read(LocalStore(tmp_path / "store"))
    hint = caught.value.hint or ""
    first, _, then = hint.partition("delete it")
    assert "on another machine" in first
    assert hint == repair_hint("delete it" + then)
