"""Room in the cache: what is dropped, what never is, and several that share it."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.identity.manifest import Manifest
from flows.leases import file_lock
from infra.storage.local import LocalStore
from nanochat_core.errors import StageError
from tests.support.flows.rows import GIGABYTE, identity_of, publish_rows
from tests.support.flows.shelf import SECONDS_TO_MEET
from tests.support.flows.stores import CountingStore, DyingStore

BLOCK = 4096  # bytes; what a small file takes on the disk


def names(directory: Path) -> list[str]:
    """Everything but the empty files of locks, which stay."""
    kept = (path for path in directory.iterdir() if path.suffix in (".lock", ".used"))
    assert all(path.stat().st_size == 0 for path in kept)
    found = (path.name for path in directory.iterdir())
    return sorted(name for name in found if not name.endswith((".lock", ".used")))


def publish_block(store: LocalStore, tmp_path: Path, number: int) -> Manifest:
    """An artifact that takes five blocks: train.rows two, the other files and manifest three."""
    identity = identity_of("rows", number=number)
    data = str(number).encode() * 2 * BLOCK
    return publish_rows(store, tmp_path, train=data, identity=identity).manifest


def cached(cache: Cache, *manifests: Manifest) -> list[int]:
    """Numbers of the artifacts that are in the cache, whole or not."""
    there = {name.lstrip(".").partition("-")[0] for name in names(cache.directory / "rows")}
    return [number for number, m in enumerate(manifests) if m.fingerprint[:12] in there]


def set_last_use(cache: Cache, manifest: Manifest, seconds: float) -> None:
    (path,) = (cache.directory / "rows").glob(f"{manifest.fingerprint[:12]}-*.used")
    os.utime(path, (seconds, seconds))


def test_room_is_made_by_dropping_what_was_used_longest_ago(store, tmp_path):
    manifests = [publish_block(store, tmp_path, number) for number in range(4)]
    with Cache(tmp_path / "cache", GIGABYTE) as cache:
        for manifest in manifests[:3]:
            fetch(store, manifest, cache)
    for seconds, manifest in enumerate(manifests[:3], start=1000):
        set_last_use(cache, manifest, seconds)
    with Cache(cache.directory, GIGABYTE) as again:
        fetch(store, manifests[0], again)
    with Cache(cache.directory, 16 * BLOCK) as small:
        fetch(store, manifests[3], small)
    assert cached(cache, *manifests) == [0, 2, 3]


def test_the_one_just_fetched_stays_though_it_alone_is_over_the_limit(store, tmp_path):
    manifests = [publish_block(store, tmp_path, number) for number in range(2)]
    for number, manifest in enumerate(manifests):
        with Cache(tmp_path / "cache", 0) as cache:
            directory = fetch(store, manifest, cache)
            assert (directory / "files" / "rows.json").read_text() == "{}"
            assert cached(cache, *manifests) == [number]
    assert names(cache.directory / "rows") == [directory.name]


def test_a_fetch_is_a_use_and_closing_a_cache_the_last(store, cache, manifest):
    fetch(store, manifest, cache)
    for use in (lambda: fetch(store, manifest, cache), cache.close):
        set_last_use(cache, manifest, 1000)
        use()
        (path,) = (cache.directory / "rows").glob("*.used")
        assert path.stat().st_mtime > 1000


def test_what_an_interrupted_fetch_left_takes_room_and_is_dropped_unless_it_is_in_use(
    cache, manifest, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        fetch(DyingStore(tmp_path / "store"), manifest, cache)
    with Cache(cache.directory, 0) as small:
        small.make_room()
        assert len(names(cache.directory / "rows")) == 1
        cache.close()
        small.make_room()
    assert names(cache.directory / "rows") == []


def test_a_removal_that_is_cut_off_leaves_no_half_copy_under_the_name(
    store, cache, manifest, monkeypatch
):
    directory = fetch(store, manifest, cache)
    cache.close()

    def die_half_way(path: Path, **options: bool) -> None:
        if path.exists():
            next(path.glob("files/*.rows")).unlink()
            raise KeyboardInterrupt

    with Cache(cache.directory, 0) as small, monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die_half_way)
        with pytest.raises(KeyboardInterrupt):
            small.make_room()
    assert names(directory.parent) == [f".{directory.name}.new"]
    store.fetched.clear()
    assert fetch(store, manifest, cache) == directory
    assert len(store.fetched) == 4
    assert names(directory.parent) == [directory.name]


def test_strangers_in_the_cache_are_left_alone(store, cache, manifest):
    fetch(store, manifest, cache)
    cache.close()
    (cache.directory / "rows" / "notes").mkdir()
    (cache.directory / "rows" / "notes" / "mine").write_text("mine")
    (cache.directory / "mine").write_text("mine")
    with Cache(cache.directory, 0) as small:
        small.make_room()
    assert names(cache.directory / "rows") == ["notes"]
    assert (cache.directory / "mine").exists()


# Several caches of one directory: the locks are as those of several processes.


def test_waiting_for_another_process_that_fetches_can_be_stopped(store, cache, manifest):
    directory = cache.use(manifest)
    counted: list[int] = []

    def stop_at_third(count: int) -> None:
        counted.append(count)
        if len(counted) == 3:
            raise StageError("the run is being stopped")

    with (
        file_lock.hold(directory.with_name(f"{directory.name}.lock"), lambda: None),
        pytest.raises(StageError),
    ):
        fetch(store, manifest, cache, on_bytes=stop_at_third)
    assert counted == [0, 0, 0]
    assert store.fetched == []
    fetch(store, manifest, cache)


def test_two_that_fetch_at_once_fetch_once(store, cache, manifest, tmp_path):
    is_waiting = threading.Event()

    class Slow(CountingStore):
        """Answers when the other one waits, or has fetched."""

        def fetch(self, key: str, path: Path, **options: Any) -> None:
            assert is_waiting.wait(SECONDS_TO_MEET)
            super().fetch(key, path, **options)

    slow = Slow(tmp_path / "store")
    with Cache(cache.directory, GIGABYTE) as other, ThreadPoolExecutor() as threads:
        first = threads.submit(fetch, slow, manifest, cache)
        second = threads.submit(
            fetch, store, manifest, other, on_bytes=lambda count: is_waiting.set()
        )
        assert first.result() == second.result()
    assert len(slow.fetched) + len(store.fetched) == 4


def test_what_another_uses_is_not_dropped_until_it_ends(store, cache, tmp_path):
    manifests = [publish_block(store, tmp_path, number) for number in range(2)]
    fetch(store, manifests[0], cache)
    with Cache(cache.directory, 0) as small:
        fetch(store, manifests[1], small)
        assert cached(cache, *manifests) == [0, 1]
    cache.close()
    with Cache(cache.directory, 0) as small:
        small.make_room()
    assert cached(cache, *manifests) == []


def test_those_that_fetch_use_and_drop_at_once_never_see_a_copy_go(store, tmp_path):
    manifests = [publish_block(store, tmp_path, number) for number in range(4)]

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(40):
            number = generator.randrange(len(manifests))
            with Cache(tmp_path / "cache", 10 * BLOCK) as small:
                files = fetch(store, manifests[number], small) / "files"
                for _ in range(3):
                    assert (files / "train.rows").read_text() == str(number) * 2 * BLOCK
                    assert (files / "rows.json").read_text() == "{}"

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, range(3)))
