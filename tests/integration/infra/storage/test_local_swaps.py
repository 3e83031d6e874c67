"""Swaps in a directory: one winner, and a process that is stopped keeps hardly anybody waiting."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage import local
from infra.storage.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the store keeps what is not finished."""
    return tmp_path / "store" / ".tmp"


def swap(store: LocalStore, key: str, data: bytes) -> bool:
    return store.put_if_same(key, data, version=store.get_stored(key).version)


def test_swaps_leave_nothing_behind(store: LocalStore, temporary: Path) -> None:
    store.put("a", b"0")
    version = store.get_stored("a").version
    assert swap(store, "a", b"1")
    assert not store.put_if_same("a", b"2", version=version)
    assert store.put_if_same("a", b"1", version=version)  # is there already: counts as ours
    assert not store.put_if_same("none", b"2", version=version)
    assert list(temporary.iterdir()) == []


COUNTER = """
import sys
from pathlib import Path
from infra.storage.local import LocalStore

store = LocalStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
done = 0
while done < int(sys.argv[3]) and not Path(sys.argv[1], "..", "enough").exists():
    stored = store.get_stored("a")
    number = int(stored.data.split()[0]) + 1
    done += store.put_if_same("a", f"{number} {sys.argv[2]}".encode(), version=stored.version)
print(done)
"""


def start(program: str, store: LocalStore, name: str, count: int = 100) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", program, store.url.removeprefix("file://"), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for_both(store: LocalStore, names: set[str]) -> None:
    """Return when each of these processes has swapped: swaps are not fair, one may win often."""
    deadline = time.monotonic() + 60
    while names and time.monotonic() < deadline:
        names = names - {store.get("a").split()[1].decode()}
        time.sleep(0.001)
    assert not names


def test_processes_that_are_stopped_in_the_midst_lose_no_step_and_do_not_block_others(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SECONDS_TO_SWAP", 0.1)
    store.put("a", b"0 nobody")
    counters = [start(COUNTER, store, name, 10**9) for name in ("one", "two")]
    for counter in counters:
        assert counter.stdin
        counter.stdin.write("\n")
        counter.stdin.flush()
    for _ in range(10):
        for counter in counters:
            counter.send_signal(signal.SIGSTOP)
            os.waitpid(counter.pid, os.WUNTRACED)  # it stands still
        stored = store.get_stored("a")
        number = int(stored.data.split()[0]) + 1
        assert store.put_if_same("a", f"{number} us".encode(), version=stored.version)
        for counter in counters:
            counter.send_signal(signal.SIGCONT)
        while store.get("a") == f"{number} us".encode():
            time.sleep(0.001)
    wait_for_both(store, {"one", "two"})
    (tmp_path / "enough").touch()
    theirs = [int(counter.communicate(timeout=120)[0]) for counter in counters]
    assert all(theirs)
    assert int(store.get("a").split()[0]) == sum(theirs) + 10


def stop_at(monkeypatch: pytest.MonkeyPatch, moment: str, others: Callable[[], None]) -> None:
    """Let others go on while one who swaps stands still: before or after it looks."""
    real = local.read_plain

    def read_plain(path: Path, *, limit: int) -> tuple[bytes, float]:
        monkeypatch.setattr(local, "read_plain", real)
        if moment == "before":
            others()
            return real(path, limit=limit)
        found = real(path, limit=limit)
        others()
        return found

    monkeypatch.setattr(local, "read_plain", read_plain)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_swap_that_was_suspended_too_long_sees_the_others_write(
    store: LocalStore, temporary: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(local, "_SECONDS_TO_SWAP", 0.05)
    store.put("a", b"0")
    version = store.get_stored("a").version
    stop_at(monkeypatch, moment, lambda: swap(store, "a", b"of another") and None)

    assert not store.put_if_same("a", b"late", version=version)

    assert store.get("a") == b"of another"
    assert list(temporary.iterdir()) == []


def test_a_suspended_swap_takes_its_lock_again(
    store: LocalStore, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SECONDS_TO_SWAP", 0.05)
    store.put("a", b"0")
    stored = store.get_stored("a")
    stop_at(monkeypatch, "after", lambda: store.put_if_same("a", b"no", version="x") and None)

    assert store.put_if_same("a", b"late", version=stored.version)

    assert store.get("a") == b"late"
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_of_its_lock_blocks_no_other(
    store: LocalStore, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SECONDS_TO_SWAP", 0.05)
    store.put("a", b"0")
    version = store.get_stored("a").version

    def die() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(local, "_remove", lambda path: None)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        stop_at(patch, "after", die)
        with pytest.raises(KeyboardInterrupt):
            store.put_if_same("a", b"1", version=version)
    assert len(list(temporary.glob("swap-*/*"))) == 1
    assert swap(store, "a", b"2")
    assert list(temporary.glob("swap-*")) == []


def test_a_lock_that_was_left_is_removed_with_other_unfinished_files(
    store: LocalStore, temporary: Path
) -> None:
    store.put("a", b"0")
    left = temporary / f"swap-{'0' * 32}" / "0123"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"1")
    assert store.abort_stale_uploads(older_than=3600) == 0
    assert store.abort_stale_uploads(older_than=-1) == 1
    assert list(temporary.iterdir()) == []
