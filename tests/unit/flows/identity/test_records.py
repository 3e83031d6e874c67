"""Records of every kind: one that is damaged, moved or of another format is refused by its name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flows.artifacts import checkpoint_records, pins, revocations, runs
from flows.artifacts.publish import find_manifest
from flows.identity import manifest, redo
from flows.identity.records import decode_record, encode_record
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.shelf import make_manifest, put_artifact, put_run

SFT = make_manifest("sft")
REF, PIN = SFT.ref, f"{pins.PINS}1.json"
# Key and format of a record of each kind, and what reads it.
RECORDS: dict[str, tuple[str, int, Callable[[LocalStore], object]]] = {
    "manifest": (REF.manifest_key, manifest.FORMAT, partial(find_manifest, ref=REF)),
    "run": ("runs/tiny-1.json", runs.FORMAT, partial(runs.find_run, run="tiny-1")),
    "tag": ("refs/main.json", runs.TAG_FORMAT, partial(runs.find_tag, name="main")),
    "revocation": (
        *(REF.revocation_key, revocations.FORMAT),
        partial(revocations.find_revocation, ref=REF),
    ),
    "redo counter": (REF.redo_key, redo.FORMAT, partial(redo.find_redo, recipe=REF)),
    "pin": (PIN, pins.FORMAT, partial(pins.find_pin, key=PIN)),
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a record of each kind."""
    store = LocalStore(tmp_path / "store")
    put_run(store, "tiny-1", put_artifact(store, SFT))
    runs.point(store, "main", "tiny-1")
    revocations.revoke(store, SFT, why="why", who="me", when="2026-11-21T07:00:00Z")
    redo.raise_redo(store, REF, redo.RedoCounter(), redo.RedoCounter(number=1))
    store.put(PIN, encode_record({"artifacts": [], "why": ""}, format=pins.FORMAT))
    return store


def refusal(store: LocalStore, kind: str, data: bytes) -> ArtifactError:
    """Return the error, of one line with the record's key, that refuses `data` as a record."""
    key, _, read = RECORDS[kind]
    store.put(key, data)
    with pytest.raises(ArtifactError) as caught:
        read(store)
    assert f"{store.url}/{key}" in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("kind", RECORDS)
def test_a_damaged_record_is_looked_at_from_elsewhere_before_it_is_deleted(store, kind):
    key, format, read = RECORDS[kind]
    assert read(store)
    whole = store.get(key)
    flipped = whole.replace(b'"check": "', b'"check": "0')  # but for its checksum whole
    for data in (b"", b"[]", whole[:-9], flipped, encode_record({"a": 1}, format=format)):
        hint = refusal(store, kind, data).hint or ""
        if kind == "tag":
            assert hint == "point it at a run again: nanochat tag main RUN"
        else:
            assert "on another machine" in hint.partition("delete it")[0]


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize(("change", "hint"), [(-1, "another version"), (1, "update")])
def test_a_record_of_another_format_is_refused_by_its_number(store, kind, change, hint):
    key, format, _ = RECORDS[kind]
    tree = decode_record(store.get(key), format=format, where=key)
    error = refusal(store, kind, encode_record(tree, format=format + change))
    assert f"is of format {format + change}, this version reads {format}" in str(error)
    assert kind == "tag" or hint in (error.hint or "")
    assert "delete" not in (error.hint or "")


def test_a_number_changes_only_with_what_is_stored_under_it():
    """A version with another number reads none of the records that stores have."""
    numbers = {kind: number for kind, (_, number, _) in RECORDS.items()}
    of_artifacts = {"manifest": 4, "revocation": 3, "redo counter": 1, "pin": 1}
    assert numbers == {**of_artifacts, "run": 6, "tag": 4}
    assert (checkpoint_records.FORMAT, lease.FORMAT) == (3, 3)


@pytest.mark.parametrize(
    ("kind", "key", "read"),
    [
        (
            *("manifest", f"sft/{'0' * 64}/manifest.json"),
            partial(find_manifest, ref=ArtifactRef("sft", "0" * 64)),
        ),
        ("run", "runs/tiny-2.json", partial(runs.find_run, run="tiny-2")),
        ("tag", "refs/other.json", partial(runs.find_tag, name="other")),
    ],
)
def test_a_record_that_was_moved_is_refused(store, kind, key, read):
    store.put(key, store.get(RECORDS[kind][0]))
    with pytest.raises(ArtifactError, match=f"{key} is the (manifest|record) of"):
        read(store)
