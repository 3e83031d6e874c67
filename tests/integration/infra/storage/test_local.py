"""The store in a directory: whole objects or none, and "cannot reach" never means "not there"."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from infra.storage import local, plain_files
from infra.storage.base import ObjectNotFound, StoreUnavailable
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.support.infra.deployed import ROOT
from tests.support.infra.storage.verbs import READS, VERBS


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_many_first_writes_at_once_all_arrive(tmp_path: Path):
    for number in range(40):
        store = LocalStore(tmp_path / f"store-{number}")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n, s=store: s.put(f"a/{n}", b""), range(8)))


def test_a_missing_object_is_missing_whatever_is_asked_of_it(store: LocalStore, tmp_path: Path):
    store.put("a/b", b"")
    for key in ("none", "a", "a/c", "a/b/c"):
        for use in READS.values():
            with pytest.raises(ObjectNotFound):
                use(store, key, tmp_path / "source")
        if key != "a":
            store.delete(key)


def test_a_store_whose_disk_is_not_there_is_an_error_and_never_empty(tmp_path: Path):
    store = LocalStore(tmp_path / "not-mounted" / "store")
    (tmp_path / "source").write_bytes(b"")
    for use in VERBS.values():
        with pytest.raises(StoreError, match="not-mounted does not exist") as caught:
            use(store, "a/b", tmp_path / "source")
        assert caught.value.hint
    assert not (tmp_path / "not-mounted").exists()


@pytest.mark.parametrize("use", READS)
def test_a_disk_that_comes_back_while_an_object_is_looked_for_has_not_lost_it(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    store.put("a", b"x")
    root, away = tmp_path / "store", tmp_path / "away"
    root.rename(away)
    look = local.open_plain

    def look_too_early(path: Path) -> BinaryIO:
        try:
            return look(path)
        finally:
            away.rename(root)

    for module in (local, plain_files):
        monkeypatch.setattr(module, "open_plain", look_too_early)
    with pytest.raises(StoreUnavailable, match="is gone"):
        READS[use](store, "a", tmp_path / "source")


@pytest.mark.parametrize(
    ("function", "use"),
    [
        ("check_folder", "list"),
        ("os.fsync", "put"),
        ("os.fsync", "put_if_absent"),
        ("sync_directory", "put"),
        ("read_plain", "put_if_same"),
        ("os.fsync", "upload"),
        ("check_folder", "abort"),
    ],
)
def test_a_disk_that_goes_during_a_call_is_gone_and_no_other_takes_its_place(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, use: str
) -> None:
    store.put("a", b"x")
    root, away = tmp_path / "store", tmp_path / "away"
    (tmp_path / "file").write_bytes(b"z")
    owner, name = (os, "fsync") if function == "os.fsync" else (local, function)
    work = getattr(owner, name)

    def go_first(*arguments: Any, **more: Any) -> Any:
        if not away.exists():
            root.rename(away)
        return work(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, go_first)
        with pytest.raises(StoreUnavailable, match="is gone"):
            VERBS[use](store, "b/c/d" if function == "sync_directory" else "b", tmp_path / "file")
    assert not root.exists()
    away.rename(root)
    assert [entry.key for entry in store.list("")] == ["a"]
    assert store.get("a") == b"x"


def test_a_file_in_the_place_of_the_store_is_an_error(tmp_path: Path):
    (tmp_path / "store").write_text("")
    store = LocalStore(tmp_path / "store")
    for name in ("get", "put", "list"):
        with pytest.raises(StoreError, match="is a file"):
            VERBS[name](store, "a", tmp_path / "source")


def test_a_key_cannot_be_a_directory_of_another(store: LocalStore):
    store.put("a/b", b"")
    for use in (store.put, store.put_if_absent):
        with pytest.raises(StoreError):
            use("a", b"")
        with pytest.raises(StoreError):
            use("a/b/c", b"")


@pytest.mark.parametrize(
    ("number", "hint", "kind"),
    [
        (errno.ENOSPC, "free some space", StoreError),
        (errno.EPERM, "hard links", StoreError),
        (errno.ESTALE, "", StoreUnavailable),  # of a file server, which may come back
        (errno.ETIMEDOUT, "", StoreUnavailable),
    ],
)
def test_a_disk_that_refuses_leaves_no_object_and_says_what_to_do(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    hint: str,
    kind: type[StoreError],
):
    (tmp_path / "source").write_bytes(b"12")
    store.put("a/old", b"old")

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for key, name in (("a/old", "put"), ("a/b", "put_if_absent"), ("a/c", "upload")):
        with pytest.raises(StoreError, match=os.strerror(number).lower()) as caught:
            VERBS[name](store, key, tmp_path / "source")
        assert type(caught.value) is kind
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


def swap(store: LocalStore, key: str, data: bytes) -> bool:
    return store.put_if_same(key, data, version=store.get_stored(key).version)


def test_swaps_leave_their_lock_behind_and_nothing_else(store: LocalStore, tmp_path: Path) -> None:
    temporary = tmp_path / "store" / ".tmp"
    store.put("a", b"0")
    version = store.get_stored("a").version
    assert swap(store, "a", b"1")
    assert not store.put_if_same("a", b"2", version=version)
    (temporary / ("0" * 32)).write_bytes(b"1")
    assert store.abort_stale_uploads(before=0.0) == 0  # another process may be writing it
    assert store.abort_stale_uploads(before=1e12) == 1
    assert [path.name for path in temporary.iterdir()] == ["swap.lock"]


# Stands still in a swap, with its lock.
STOPPED = """
import signal, sys, os
from pathlib import Path
from infra.storage import local

store = local.LocalStore(Path(sys.argv[1]))
version = store.get_stored("a").version
local.read_plain = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
store.put_if_same("a", b"late", version=version)
"""


def test_a_process_that_stands_still_in_a_swap_keeps_others_waiting_until_it_is_killed(
    store: LocalStore,
) -> None:
    store.put("a", b"0")
    command = [sys.executable, "-c", STOPPED, store.url.removeprefix("file://")]
    with subprocess.Popen(command, cwd=ROOT) as other, ThreadPoolExecutor(1) as pool:
        os.waitpid(other.pid, os.WUNTRACED)
        swapped = pool.submit(swap, store, "a", b"1")
        is_waiting = wait([swapped], timeout=0.2).not_done
        other.kill()
        assert is_waiting
        assert swapped.result(60)
    assert store.get("a") == b"1"


def test_the_lock_is_a_plain_file_that_each_user_of_the_store_may_lock(
    store: LocalStore, tmp_path: Path
) -> None:
    store.put("a", b"0")
    assert swap(store, "a", b"1")
    lock = tmp_path / "store" / ".tmp" / "swap.lock"
    assert lock.stat().st_mode & 0o777 == 0o666
    lock.unlink()
    (tmp_path / "outside").write_bytes(b"")
    lock.symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="refuses"):
        swap(store, "a", b"2")
