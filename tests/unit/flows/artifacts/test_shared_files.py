"""An artifact that has files of an earlier one names them there, and they outlive the other."""

import random
from pathlib import Path

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.pins import PINS, find_pin
from flows.artifacts.publish import MIN_SIZE
from flows.artifacts.transfer import scratch_name
from flows.identity.fingerprint import Identity
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError
from tests.support.flows.rows import GIGABYTE, identity_of, publish_output
from tests.support.flows.rubbish import start_collection
from tests.support.reliability.memory_store import MemoryStore

SHARDS = {f"shard_{n}": random.Random(n).randbytes(MIN_SIZE + n) for n in range(5)}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def identity(count: int) -> Identity:
    return identity_of("shards", num_shards=count)


def publish_shards(
    store: Store, directory: Path, count: int, *, files=None, redo=0, **options
) -> Manifest:
    """The first `count` shards and their index, or these files, as an artifact."""
    output = directory / f"output-{count}"
    output.mkdir(exist_ok=True)
    for name, data in (files or dict(list(SHARDS.items())[:count])).items():
        (output / name).write_bytes(data)
    (output / "shards.json").write_text(f"{count}")
    made = publish_output(store, output, identity=identity(count).redone(redo), **options)
    return made.manifest


def keys(manifest: Manifest) -> dict[str, str]:
    return {file.path: file.key for file in manifest.files}


def stored(store: MemoryStore, count: int) -> set[str]:
    """Paths of the files that were stored under an artifact's own name."""
    return {
        key.split("/")[-1] for key in store.names(f"shards/{identity(count).fingerprint}/files")
    }


def test_files_of_an_earlier_artifact_are_not_stored_again(store, tmp_path):
    old = publish_shards(store, tmp_path, 2)
    counted: list[int] = []
    new = publish_shards(store, tmp_path, 5, on_bytes=counted.append)
    assert stored(store, 2) == {"shard_0", "shard_1", "shards.json"}
    assert stored(store, 5) == {"shard_2", "shard_3", "shard_4", "shards.json"}
    assert [keys(new)[name] for name in ("shard_0", "shard_1")] == [
        keys(old)[name] for name in ("shard_0", "shard_1")
    ]
    assert sum(counted) == sum(file.size for file in new.files)
    with Cache(tmp_path / "cache", GIGABYTE) as cache:
        files = fetch(store, new, cache) / "files"
        assert {name: (files / name).read_bytes() for name in SHARDS} == SHARDS


def test_the_same_bytes_under_another_name_are_shared_too(store, tmp_path):
    old = publish_shards(store, tmp_path, 2)
    new = publish_shards(store, tmp_path, 3, files={"last": SHARDS["shard_1"]})
    assert keys(new)["last"] == keys(old)["shard_1"]


def test_equal_files_that_share_an_object_are_fetched_side_by_side(store, tmp_path):
    publish_shards(store, tmp_path, 1)
    equal = dict.fromkeys(("one", "two"), SHARDS["shard_0"])
    new = publish_shards(store, tmp_path, 2, files=equal)
    assert keys(new)["one"] == keys(new)["two"]
    assert len({scratch_name(file) for file in new.files}) == len(new.files)


def test_small_files_are_stored_again(store, tmp_path):
    small = {"small": b"x" * (MIN_SIZE - 1)}
    for count in (1, 2):
        publish_shards(store, tmp_path, count, files=small)
    assert "small" in stored(store, 2)


def test_another_files_bytes_are_never_taken(store, tmp_path):
    publish_shards(store, tmp_path, 1)
    other = SHARDS["shard_0"][:-1] + b"?"
    new = publish_shards(store, tmp_path, 2, files={"shard_0": other})
    assert store.get(keys(new)["shard_0"]) == other


@pytest.mark.parametrize("change", ["gone", "short"])
def test_an_object_that_is_not_whole_is_not_named(store, tmp_path, change):
    old = publish_shards(store, tmp_path, 1)
    store.delete(keys(old)["shard_0"])
    if change == "short":
        store.put(keys(old)["shard_0"], SHARDS["shard_0"][:-1])
    new = publish_shards(store, tmp_path, 2)
    assert store.get(keys(new)["shard_0"]) == SHARDS["shard_0"]


def test_building_again_mends_what_was_damaged_in_the_store(store, tmp_path):
    old = publish_shards(store, tmp_path, 2)
    new = publish_shards(store, tmp_path, 3)
    store.put(keys(old)["shard_0"], b"?" * MIN_SIZE)
    with Cache(tmp_path / "cache", GIGABYTE) as cache:
        with pytest.raises(ArtifactError, match="shard_0 of shards/"):
            fetch(store, new, cache)
        mended = publish_shards(store, tmp_path, 3, redo=1)
        files = fetch(store, mended, cache) / "files"
        assert (files / "shard_0").read_bytes() == SHARDS["shard_0"]


def test_while_garbage_is_collected_nothing_is_shared_and_nothing_waits(store, tmp_path):
    publish_shards(store, tmp_path, 1)
    start_collection(store)
    publish_shards(store, tmp_path, 2)
    assert stored(store, 2) == {"shard_0", "shard_1", "shards.json"}
    assert store.names(PINS) == set()


def test_shared_files_are_pinned_until_the_manifest_names_them(store, tmp_path):
    first = publish_shards(store, tmp_path, 1)
    publish_shards(store, tmp_path, 2)
    places: list[tuple[str, str]] = []

    def check_lease() -> None:
        if not store.names(PINS):  # before the first upload
            return
        (key,) = store.names(PINS)
        found = find_pin(store, key)
        places.extend(found.artifacts)

    publish_shards(store, tmp_path, 3, check_lease=check_lease)
    assert ("shards", first.fingerprint) in places  # where the bytes lie
    assert store.names(PINS) == set()
