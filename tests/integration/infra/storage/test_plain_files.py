"""What lies in a directory store instead of an object or a folder is neither read nor followed."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage.base import BadObject, ObjectNotFound
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.support.infra.storage.owners import own_as_user, path_of
from tests.support.infra.storage.verbs import CONDITIONAL, OF_KEYS, OF_STORES, READS, WRITES


def make_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


STRANGERS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "link to a folder": lambda path: path.symlink_to("/etc"),
}


@pytest.fixture(params=STRANGERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    """A store with something at the key a/x that is no object."""
    store = LocalStore(tmp_path / "store")
    store.put("a/b", b"object")
    STRANGERS[request.param](tmp_path / "store" / "a" / "x")
    return store


@pytest.mark.timeout(120)
def test_what_is_no_plain_file_is_one_line_and_nothing_waits_for_it(
    store: LocalStore, tmp_path: Path
) -> None:
    for use in (READS | CONDITIONAL).values():
        with pytest.raises(BadObject, match=r"store/a/x is not a plain file") as caught:
            use(store, "a/x", tmp_path / "source")
        assert "\n" not in str(caught.value)
        assert caught.value.hint
    assert [entry.key for entry in store.list("")] == ["a/b"]
    assert not (tmp_path / "target").exists()


def test_it_can_be_replaced_and_removed(store: LocalStore) -> None:
    store.put("a/x", b"mine")
    assert store.get("a/x") == b"mine"
    store.delete("a/x")
    assert [entry.key for entry in store.list("")] == ["a/b"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_folder_at_a_key_leaves_no_descriptor_open(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/b", b"object")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(ObjectNotFound):
            store.get("a")
    assert len(os.listdir("/proc/self/fd")) == before


OLD = (1e9, 1e9)  # seconds; older than any limit


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the store, with old files whose names the store could have made."""
    outside = tmp_path / "outside"
    for name in ("b", "sub/b", "0" * 32, "thesis"):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_bytes(b"not in the store")
    for path in (*outside.rglob("*"), outside):
        os.utime(path, OLD)
    return outside


def contents(directory: Path) -> dict[str, tuple[int, float]]:
    """Every path below, with its size and time."""
    paths = sorted(directory.rglob("*"))
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime) for p in (directory, *paths)}


@pytest.mark.parametrize("folder", ["a", "a/sub"])
def test_no_verb_follows_a_folder_that_is_a_link(
    tmp_path: Path, outside: Path, folder: str
) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("other/x", b"object")
    link = tmp_path / "store" / folder
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    before = contents(outside)
    for use in (*OF_KEYS.values(), OF_STORES["list"]):
        for key in ("a/sub/b", "a/sub/new/c"):
            with pytest.raises(StoreError, match=rf"store/{folder} is a link") as caught:
                use(store, key, outside / "b")
            assert "\n" not in str(caught.value)
            assert "remove the link" in (caught.value.hint or "")
    assert contents(outside) == before
    assert [entry.key for entry in store.list("")] == ["other/x"]


def test_a_linked_directory_for_unfinished_files_is_refused(tmp_path: Path, outside: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/b", b"object")
    (tmp_path / "store" / ".tmp").rmdir()
    (tmp_path / "store" / ".tmp").symlink_to(outside)
    before = contents(outside)
    for use in (*WRITES.values(), OF_STORES["abort"]):
        with pytest.raises(StoreError, match=r"store/\.tmp is a link") as caught:
            use(store, "a/c", outside / "b")
        assert "remove the link" in (caught.value.hint or "")
    assert contents(outside) == before
    assert store.get("a/b") == b"object"


def test_only_what_the_store_names_is_removed_as_unfinished(tmp_path: Path, outside: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a/b", b"object")
    temporary = tmp_path / "store" / ".tmp"
    (temporary / "thesis").mkdir()
    (temporary / "1".zfill(32)).symlink_to(outside)
    (temporary / "2".zfill(32)).write_bytes(b"half an obj")
    (temporary / "3".zfill(32)).mkdir()
    before = contents(outside)
    assert store.abort_stale_uploads(before=1e12) == 2
    assert {path.name for path in temporary.iterdir()} == {"thesis", "3".zfill(32)}
    assert contents(outside) == before


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_fetch_shares_bytes_only_with_an_object_of_the_same_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_ours: bool
) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a", b"object")
    path = path_of(store, "a")
    assert path.stat().st_mode & 0o777 == 0o444
    user = own_as_user(tmp_path / "store", monkeypatch)
    if not is_ours:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    for _ in range(2):
        store.fetch("a", target, size=6)
        assert target.read_bytes() == b"object"
        assert target.samefile(path) == is_ours
    assert [path.name for path in target.parent.iterdir()] == ["target"]
