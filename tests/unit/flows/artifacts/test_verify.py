"""Every byte is compared with the manifest; what came out wrong is asked for again, then named."""

import errno
import hashlib
import threading
import time
from pathlib import Path

import pytest

from flows.artifacts import transfer
from flows.artifacts.cache import fetch
from flows.artifacts.transfer import (
    fetch_file,
    fetch_verified,
    find_fault,
    scratch_name,
    transfer_each,
)
from flows.identity.manifest import File
from infra.retry import TRIES
from infra.storage.base import OnBytes
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.rows import publish_rows
from tests.support.flows.stores import NoisyStore
from tests.support.infra.storage.owners import own_as_user
from tests.unit.flows.artifacts.conftest import DAMAGE


@pytest.mark.parametrize(
    ("kind", "tries"), [("bit", TRIES), ("truncated", TRIES), ("longer", 1), ("gone", 1)]
)
@pytest.mark.parametrize("place", ["train.rows", "events.jsonl"])
def test_damage_in_the_store_is_found_and_named(store, cache, manifest, kind, tries, place):
    (file,) = [f for f in (*manifest.files, *manifest.logs) if f.path == place]
    whole = store.get(file.key)
    if kind == "gone":
        store.delete(file.key)
    else:
        store.put(file.key, DAMAGE[kind](whole))
    with pytest.raises(ArtifactError, match=f"{place} of {manifest.name}") as caught:
        fetch(store, manifest, cache)
    assert f"{store.url}/{file.key}" in str(caught.value)
    assert kind != "gone" or "is gone" in str(caught.value)
    assert "`nanochat run PROFILE --force rows`" in (caught.value.hint or "")
    assert store.fetched.count(file.key) == tries
    assert not list(cache.directory.glob("*/*/manifest.json"))
    store.put(file.key, whole)
    fetch(store, manifest, cache)


@pytest.mark.parametrize("wrong", range(1, TRIES))
def test_what_was_damaged_on_the_way_is_asked_for_again(cache, tmp_path, wrong):
    store = NoisyStore(
        tmp_path / "store", lambda data, time: DAMAGE["longer"](data) if time < wrong else data
    )
    manifest = publish_rows(store, tmp_path).manifest
    directory = fetch(store, manifest, cache)
    assert (directory / "files" / "train.rows").read_bytes() == b"123456"
    assert len(store.fetched) == (wrong + 1) * 4


def test_a_way_that_damages_again_and_again_is_distinguished_from_a_damaged_object(cache, tmp_path):
    store = NoisyStore(tmp_path / "store", lambda data, time: data + b"x" * (time + 1))
    manifest = publish_rows(store, tmp_path).manifest
    with pytest.raises(ArtifactError, match="came out wrong 3 times, not twice the same") as caught:
        fetch(store, manifest, cache)
    assert "run the same command again" in (caught.value.hint or "")


def file_of(data: bytes, *, path: str = "a") -> File:
    return File(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest(), key="k/a")


def test_a_file_is_whole_only_as_a_plain_file_with_these_bytes(tmp_path):
    path, file = tmp_path / "a", file_of(b"abc")
    assert find_fault(file, path) == "is gone"
    assert find_fault(file, path / "below") == "is gone"
    path.write_bytes(b"abc")
    assert find_fault(file, path) is None
    assert find_fault(file, path / "below") == "is gone"
    (tmp_path / "link").symlink_to(path)
    assert find_fault(file, tmp_path / "link") == "is not a plain file"
    assert find_fault(file, tmp_path) == "is not a plain file"
    path.write_bytes(b"abcd")
    assert find_fault(file, path) == "has 4 bytes, its manifest says 3"


def test_a_file_that_the_disk_cannot_read_is_not_whole(tmp_path, monkeypatch):
    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr(transfer, "sha256_of", fail)
    assert find_fault(file_of(b"abc"), tmp_path / "a") == "cannot be read: input/output error"


def test_a_private_copy_is_writable_and_shares_nothing_with_the_store(tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "store")
    manifest = publish_rows(store, tmp_path).manifest
    own_as_user(tmp_path / "store", monkeypatch)
    file = manifest.files[2]
    for name in ("mine", "resumed"):
        if name == "resumed":  # a process that was killed left the store's own file in scratch
            fetch_file(store, file, tmp_path / "scratch" / scratch_name(file), of="rows")
        places = [(file, tmp_path / name)]
        fetch_verified(store, manifest, places, scratch=tmp_path / "scratch", private=True)
        assert (tmp_path / name).stat().st_nlink == 1
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o644
        (tmp_path / name).write_bytes(b"mine")
        assert store.get(file.key) == b"123456"
    fetch_file(store, file, tmp_path / "shared", of="rows")
    assert (tmp_path / "shared").stat().st_nlink == 2


def test_a_whole_file_that_was_not_put_in_its_place_is_not_fetched_again(store, tmp_path):
    manifest = publish_rows(store, tmp_path).manifest
    file = manifest.files[2]
    (tmp_path / "train.rows").mkdir()  # no file can take this place
    with pytest.raises(IsADirectoryError):
        fetch_verified(
            store, manifest, [(file, tmp_path / "train.rows")], scratch=tmp_path / "parts"
        )
    fetch_verified(store, manifest, [(file, tmp_path / "elsewhere")], scratch=tmp_path / "parts")
    assert store.fetched == [file.key]
    assert (tmp_path / "elsewhere").read_bytes() == b"123456"


def test_the_first_that_fails_stops_the_others_at_their_next_chunk():
    started = threading.Barrier(3)
    finished: list[int] = []

    def work(number: int, on_bytes: OnBytes) -> None:
        started.wait()
        if number == 2:
            raise ValueError("mine")
        end = time.monotonic() + 100
        while time.monotonic() < end:
            on_bytes(1)
            time.sleep(0.01)
        finished.append(number)

    with pytest.raises(ValueError, match="mine"):
        transfer_each(work, [0, 1, 2])
    assert finished == []
