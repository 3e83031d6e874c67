"""Swaps in a directory: one winner, and no step is lost, whatever happens to a process in one."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the store keeps what is not finished."""
    return tmp_path / "store" / ".tmp"


def swap(store: LocalStore, key: str, data: bytes) -> bool:
    return store.put_if_same(key, data, version=store.get_stored(key).version)


def test_swaps_leave_their_lock_behind_and_nothing_else(store: LocalStore, temporary: Path) -> None:
    store.put("a", b"0")
    version = store.get_stored("a").version
    assert swap(store, "a", b"1")
    assert not store.put_if_same("a", b"2", version=version)
    (temporary / ("0" * 32)).write_bytes(b"1")
    assert store.abort_stale_uploads(before=0.0) == 0  # another process may be writing it
    assert store.abort_stale_uploads(before=1e12) == 1
    assert [path.name for path in temporary.iterdir()] == ["swap.lock"]


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


def test_processes_that_are_stopped_in_the_midst_lose_no_step(
    store: LocalStore, tmp_path: Path
) -> None:
    store.put("a", b"0 nobody")
    counters = [start(COUNTER, store, name, 10**9) for name in ("one", "two")]
    ours: list[bool] = []
    for counter in counters:
        assert counter.stdin
        counter.stdin.write("\n")
        counter.stdin.flush()
    for _ in range(10):
        for counter in counters:
            counter.send_signal(signal.SIGSTOP)
            os.waitpid(counter.pid, os.WUNTRACED)  # it stands still
        stored = store.get_stored("a")
        new = f"{int(stored.data.split()[0]) + 1} us".encode()
        with ThreadPoolExecutor(1) as pool:  # one of them may have the lock
            swapped = pool.submit(store.put_if_same, "a", new, version=stored.version)
            wait([swapped], timeout=0.1)
            for counter in counters:
                counter.send_signal(signal.SIGCONT)
            ours.append(swapped.result())
        while store.get("a") in (new, stored.data):
            time.sleep(0.001)
    wait_for_both(store, {"one", "two"})
    (tmp_path / "enough").touch()
    theirs = [int(counter.communicate(timeout=120)[0]) for counter in counters]
    assert all(theirs)
    assert int(store.get("a").split()[0]) == sum(theirs) + sum(ours)


# Stands still in a swap, with its lock.
STOPPED = """
import signal, sys, os
from pathlib import Path
from infra.storage import local

store = local.LocalStore(Path(sys.argv[1]))
version = store.get_stored("a").version
print("ready", flush=True)
local.read_plain = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)
store.put_if_same("a", b"late", version=version)
"""


def test_a_process_that_stands_still_in_a_swap_keeps_others_waiting_until_it_is_killed(
    store: LocalStore,
) -> None:
    store.put("a", b"0")
    with start(STOPPED, store, "one") as other, ThreadPoolExecutor(1) as pool:
        os.waitpid(other.pid, os.WUNTRACED)
        swapped = pool.submit(swap, store, "a", b"1")
        is_waiting = wait([swapped], timeout=0.2).not_done
        other.kill()
        assert is_waiting
        assert swapped.result(60)
    assert store.get("a") == b"1"


def test_the_lock_is_a_plain_file_that_each_user_of_the_store_may_lock(
    store: LocalStore, temporary: Path, tmp_path: Path
) -> None:
    store.put("a", b"0")
    assert swap(store, "a", b"1")
    lock = temporary / "swap.lock"
    assert lock.stat().st_mode & 0o777 == 0o666
    lock.unlink()
    (tmp_path / "outside").write_bytes(b"")
    lock.symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="refuses"):
        swap(store, "a", b"2")
