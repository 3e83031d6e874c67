"""Whatever lies in a directory store instead of an object is neither waited for nor followed."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage.base import BadObject
from infra.storage.local import LocalStore


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
}


@pytest.fixture(params=STRANGERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LocalStore:
    """A store with something at the key a/x that is no object."""
    store = LocalStore(tmp_path / "store")
    store.put("a/b", b"object")
    STRANGERS[request.param](tmp_path / "store" / "a" / "x")
    return store


@pytest.mark.timeout(20)
def test_what_is_no_plain_file_is_one_line_and_nothing_waits_for_it(
    store: LocalStore, tmp_path: Path
) -> None:
    uses: list[Callable[[], object]] = [
        lambda: store.get("a/x"),
        lambda: store.get("a/x", size=9),
        lambda: store.get_stored("a/x"),
        lambda: store.get_range("a/x", start=0, length=1),
        lambda: store.head("a/x"),
        lambda: store.copy("a/x", "a/y"),
        lambda: store.fetch("a/x", tmp_path / "target", size=9),
        lambda: store.put_if_absent("a/x", b"mine"),
        lambda: store.put_if_same("a/x", b"mine", version="v"),
    ]
    for use in uses:
        with pytest.raises(BadObject, match=r"store/a/x is not a plain file") as caught:
            use()
        assert "\n" not in str(caught.value)
        assert caught.value.hint
    assert [entry.key for entry in store.list("")] == ["a/b"]
    assert not (tmp_path / "target").exists()


def test_it_can_be_replaced_and_removed(store: LocalStore) -> None:
    store.put("a/x", b"mine")
    assert store.get("a/x") == b"mine"
    store.delete("a/x")
    assert [entry.key for entry in store.list("")] == ["a/b"]
