"""Publishing: whole or absent, the first one wins, without its lease a process does nothing."""

import dataclasses

import pyarrow as pa
import pytest

from flows.artifacts.cache import fetch
from flows.artifacts.publish import Published, find_manifest, newest_manifests
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from nanochat_core.data.shard_files import write_shard
from nanochat_core.errors import ArtifactError, StageError, StoreError
from tests.support.flows.rows import (
    PROVENANCE,
    ROWS,
    identity_of,
    publish_output,
    publish_rows,
    write_output,
)


def test_what_was_published_is_found_and_fetched(store, tmp_path, cache):
    published = publish_rows(store, tmp_path)
    assert not published.adopted
    manifest = find_manifest(store, ArtifactRef("rows", ROWS.fingerprint))
    assert manifest == published.manifest
    assert [file.path for file in manifest.files] == ["rows.json", "sub/empty.bin", "train.rows"]
    directory = fetch(store, manifest, cache)
    assert (directory / "files" / "train.rows").read_bytes() == b"123456"
    assert (directory / "files" / "sub" / "empty.bin").read_bytes() == b""
    assert (directory / "logs" / "events.jsonl").read_text() == '{"kind": "start"}\n'
    assert Manifest.from_json((directory / "manifest.json").read_bytes(), where="") == manifest


def test_a_second_one_with_other_contents_is_adopted_and_recorded(store, tmp_path, cache):
    first = publish_rows(store, tmp_path)
    second = publish_rows(store, tmp_path, train=b"other!")
    assert second.adopted
    assert second.manifest == first.manifest
    assert second.divergence is not None
    recorded = Manifest.from_json(store.get(second.divergence), where="")
    assert recorded.digest != first.manifest.digest
    directory = fetch(store, recorded, cache)  # its bytes are there to be compared
    assert (directory / "files" / "train.rows").read_bytes() == b"other!"


def test_the_same_text_from_another_version_of_the_writer_is_the_same_artifact(store, tmp_path):
    path = write_output(tmp_path) / "shard_00000.parquet"
    write_shard(path, ["one document", "another"], scratch=path.parent.parent)
    first = publish_rows(store, tmp_path)
    written_by = f"version {pa.__version__}".encode()
    path.write_bytes(path.read_bytes().replace(written_by, written_by[:-1] + b"x"))
    again = publish_rows(store, tmp_path)
    assert again == Published(manifest=first.manifest, adopted=True, divergence=None)
    write_shard(path, ["one document", "a third"], scratch=path.parent.parent)
    assert publish_rows(store, tmp_path).divergence is not None


def test_what_is_asked_for_again_has_a_place_of_its_own(store, tmp_path):
    old = publish_rows(store, tmp_path).manifest
    new = publish_rows(store, tmp_path, train=b"other!", identity=ROWS.redone(1)).manifest
    assert find_manifest(store, old.ref) == old
    assert find_manifest(store, new.ref) == new
    assert new.divergences == (old.ref.manifest_key,)
    equal = publish_rows(store, tmp_path, identity=ROWS.redone(2)).manifest
    assert (equal.digest, equal.divergences) == (old.digest, ())
    assert {file.key for file in old.files}.isdisjoint(file.key for file in new.files)


@pytest.mark.parametrize("checks", [0, 1])
def test_an_owner_that_lost_its_lease_publishes_nothing_and_does_not_begin_to_upload(
    store, tmp_path, checks
):
    left = iter(range(checks))

    def check_lease() -> None:
        if next(left, None) is None:
            raise StageError("another process builds it")

    with pytest.raises(StageError):
        publish_rows(store, tmp_path, check_lease=check_lease)
    assert find_manifest(store, ROWS.ref) is None
    assert bool(list(store.list(""))) == bool(checks)


def test_a_stage_that_left_nothing_publishes_nothing(store, tmp_path):
    (tmp_path / "output").mkdir()
    with pytest.raises(ArtifactError, match="left no files"):
        publish_output(store, tmp_path / "output")


def test_an_output_that_is_no_plain_file_or_no_plain_name_is_refused(store, tmp_path):
    output = write_output(tmp_path)
    (output / "link").symlink_to("/etc/passwd")
    with pytest.raises(ArtifactError, match="not a plain file"):
        publish_output(store, output)
    (output / "link").unlink()
    (output / "with space").write_text("")
    with pytest.raises(StoreError, match="with space"):
        publish_output(store, output)
    assert find_manifest(store, ArtifactRef("rows", ROWS.fingerprint)) is None


def test_old_artifacts_are_listed_newest_first(store, tmp_path):
    for day in (3, 1, 2):
        provenance = dataclasses.replace(PROVENANCE, created=f"2026-11-0{day}T00:00:00Z")
        identity = identity_of("rows", seed=day)
        publish_output(store, write_output(tmp_path), identity=identity, provenance=provenance)
    seeds = [m.preimage["config"] for m in newest_manifests(store, "rows", 2)]
    assert seeds == [{"seed": 3}, {"seed": 2}]
    assert list(newest_manifests(store, "pretrain", 2)) == []
    store.put(f"rows/{identity_of('rows', seed=3).fingerprint}/manifest.json", b"damaged")
    seeds = [m.preimage["config"] for m in newest_manifests(store, "rows", 2)]
    assert seeds == [{"seed": 2}]
