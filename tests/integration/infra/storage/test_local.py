"""The store in a directory: whole objects or none, and "cannot reach" never means "not there"."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.storage import parts
from infra.storage.base import ObjectNotFound, check_key
from infra.storage.local import LocalStore
from infra.storage.open import open_store
from nanochat_core.errors import StoreError


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_what_was_put_is_what_is_got(store: LocalStore):
    store.put("runs/a.json", b"one")
    store.put("runs/a.json", b"two")
    assert store.get("runs/a.json") == b"two"
    assert store.head("runs/a.json").size == 3


def test_put_if_absent_keeps_the_first(store: LocalStore):
    assert store.put_if_absent("a/manifest.json", b"first")
    assert not store.put_if_absent("a/manifest.json", b"second")
    assert store.get("a/manifest.json") == b"first"


def test_many_first_writes_at_once_all_arrive(tmp_path: Path):
    for number in range(40):
        store = LocalStore(tmp_path / f"store-{number}")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n, s=store: s.put(f"a/{n}", b""), range(8)))


RACER = """
import sys
from pathlib import Path
from infra.storage.local import LocalStore

store, me = LocalStore(Path(sys.argv[1])), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
print(*(int(store.put_if_absent(f"race/{n}", me * 100_000)) for n in range(100)))
"""


def test_of_two_processes_that_put_if_absent_one_wins_every_time(store: LocalStore, tmp_path: Path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "store"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=120)[0].split() for racer in racers]
    for number, (a_won, b_won) in enumerate(zip(*answers, strict=True)):
        assert {a_won, b_won} == {"0", "1"}
        winner = b"a" if a_won == "1" else b"b"
        assert store.get(f"race/{number}") == winner * 100_000


def test_a_file_goes_in_and_comes_out(store: LocalStore, tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(3_000_000))
    store.upload("pretrain/x/model.safetensors", source)
    store.fetch("pretrain/x/model.safetensors", target, size=3_000_000)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o444
    store.fetch(
        "pretrain/x/model.safetensors", target, size=3_000_000
    )  # again, over the read-only one
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "store"}


def test_a_fetch_goes_on_with_the_same_object_only(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART", 10)
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # root gets a copy

    def stop_after_twenty(count: int) -> None:
        told.append(count)
        if sum(told) == 20:
            raise KeyboardInterrupt

    for content in (b"a" * 35, b"b" * 35):
        store.put("model", content)
        told: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            store.fetch("model", tmp_path / "target", size=35, on_bytes=stop_after_twenty)
        assert told == [0, 10, 10], "nothing is there of this object"
    told.clear()
    store.fetch("model", tmp_path / "target", size=35, on_bytes=told.append)
    assert told == [20, 10, 5]
    assert (tmp_path / "target").read_bytes() == b"b" * 35


def test_a_missing_object_is_missing_whatever_is_asked_of_it(store: LocalStore, tmp_path: Path):
    store.put("a/b", b"")
    for key in ("none", "a", "a/c", "a/b/c"):
        for ask in (
            store.get,
            store.head,
            lambda key: store.fetch(key, tmp_path / "target", size=1),
        ):
            with pytest.raises(ObjectNotFound):
                ask(key)
        if key != "a":
            store.delete(key)


def test_deleting_removes_one_object(store: LocalStore):
    store.put("a/b", b"")
    store.put("a/c", b"")
    store.delete("a/b")
    assert [entry.key for entry in store.list("")] == ["a/c"]


def test_listing_is_by_prefix_and_sorted(store: LocalStore):
    for key in ("b/x", "a/y/deep", "a/x", "ab"):
        store.put(key, b"12")
    assert [entry.key for entry in store.list("")] == ["a/x", "a/y/deep", "ab", "b/x"]
    assert [entry.key for entry in store.list("a")] == ["a/x", "a/y/deep", "ab"]
    assert [entry.key for entry in store.list("a/")] == ["a/x", "a/y/deep"]
    assert list(store.list("none/")) == []
    assert next(iter(store.list("ab"))).size == 2


@pytest.mark.parametrize(
    "key",
    [
        *("", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".tmp/x", "a/.hidden", "a\\b", "a b"),
        *("a\n", "-x", "a/" + "x" * 201, "a\0", "\u00e9"),
    ],
)
def test_a_key_that_could_leave_the_store_is_refused(store: LocalStore, tmp_path: Path, key: str):
    source = tmp_path / "source"
    source.write_bytes(b"")
    for use in (
        lambda: store.put(key, b""),
        lambda: store.put_if_absent(key, b""),
        lambda: store.get(key),
        lambda: store.delete(key),
        lambda: store.upload(key, source),
        lambda: store.fetch(key, tmp_path / "target", size=1),
    ):
        with pytest.raises(StoreError):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_ordinary_names_are_keys():
    for key in ("pretrain/0a/files/x/shard_00000.parquet", "_a/bC-1", "runs/tiny-2026.json"):
        assert check_key(key) == key


def test_a_store_whose_disk_is_not_there_is_an_error_and_never_empty(tmp_path: Path):
    store = LocalStore(tmp_path / "not-mounted" / "store")
    for use in (
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: list(store.list("a/")),
        lambda: store.delete("a"),
        lambda: store.put("a", b""),
        lambda: store.put_if_absent("a", b""),
        lambda: store.fetch("a", tmp_path / "target", size=1),
    ):
        with pytest.raises(StoreError, match="not-mounted does not exist") as caught:
            use()
        assert caught.value.hint
    assert not (tmp_path / "not-mounted").exists()


def test_a_file_in_the_place_of_the_store_is_an_error(tmp_path: Path):
    (tmp_path / "store").write_text("")
    store = LocalStore(tmp_path / "store")
    for use in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: list(store.list(""))):
        with pytest.raises(StoreError, match="is a file"):
            use()


def test_a_key_cannot_be_a_directory_of_another(store: LocalStore):
    store.put("a/b", b"")
    for use in (store.put, store.put_if_absent):
        with pytest.raises(StoreError):
            use("a", b"")
        with pytest.raises(StoreError):
            use("a/b/c", b"")


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "free some space"), (errno.EACCES, "who owns it")]
)
def test_a_disk_that_refuses_leaves_no_object_and_says_what_to_do(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
):
    source = tmp_path / "source"
    source.write_bytes(b"12")
    store.put("a/old", b"old")

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for use in (
        lambda: store.put("a/old", b"new"),
        lambda: store.put_if_absent("a/b", b"x"),
        lambda: store.upload("a/c", source),
    ):
        with pytest.raises(StoreError, match=os.strerror(number).lower()) as caught:
            use()
        assert hint in (caught.value.hint or "")
    assert [entry.key for entry in store.list("")] == ["a/old"]
    assert store.get("a/old") == b"old"
    assert list((tmp_path / "store" / ".tmp").iterdir()) == []


def test_bytes_are_flushed_before_they_get_a_name_and_each_new_name_after(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see which file a descriptor is")
    flushed: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda number: flushed.append(Path(os.readlink(f"/proc/self/fd/{number}")))
    )
    store.put_if_absent("a/b/c", b"x")
    root = tmp_path / "store"
    names = [root / ".tmp" / "*" if path.parent.name == ".tmp" else path for path in flushed]
    new_directories = [tmp_path, root]
    assert names == [*new_directories, root / ".tmp" / "*", root, root / "a", root / "a" / "b"]


def test_a_url_opens_the_directory_it_names(tmp_path: Path):
    directory = tmp_path / "my store#1"
    store = open_store(directory.as_uri())
    assert store.url == directory.as_uri()
    store.put("a", b"x")
    assert (directory / "a").read_bytes() == b"x"


@pytest.mark.parametrize(
    "url", ["gs://bucket/prefix", "/tmp/store", "", "file://host/x", "file:relative", "file:///a?b"]
)
def test_a_url_that_is_no_store_says_what_one_looks_like(url: str):
    with pytest.raises(StoreError, match="unsupported store URL") as caught:
        open_store(url)
    assert "file:///" in (caught.value.hint or "")
