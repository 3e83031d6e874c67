"""Processes that share a cache."""

import subprocess
import sys
from pathlib import Path

import pytest

from flows.artifacts.cache import Cache, fetch
from tests.support.flows.stores import DyingStore
from tests.support.flows.waiting import wait_until
from tests.unit.flows.artifacts.conftest import cache, manifest, store
from tests.unit.flows.artifacts.test_cache_room import cached, names, publish_block

REPOSITORY = Path(__file__).parents[4]
__all__ = ["cache", "manifest", "store"]


def run_python(source: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


USER = """
import sys
from pathlib import Path
from flows.artifacts.publish import find_manifest
from flows.artifacts.cache import Cache, fetch
from flows.identity.ref import ArtifactRef
from tests.support.flows.stores import CountingStore, DyingStore

store = CountingStore(Path(sys.argv[1]))
manifest = find_manifest(store, ArtifactRef("rows", sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
cache = Cache(Path(sys.argv[2]), 10**9)
directory = fetch(store, manifest, cache)
print("using", len(store.fetched), flush=True)
sys.stdin.readline()
print((directory / "files" / "train.rows").read_text(), flush=True)
"""
# The first to fetch waits until the other has tried the lock.
SLOW_USER = (
    """
import os, time
import flows.artifacts.cache, flows.artifacts.transfer, flows.leases.file_lock

lock, slow = flows.leases.file_lock.hold, flows.artifacts.transfer.fetch_verified

def note_and_try(path, on_wait):
    (Path(sys.argv[4]) / str(os.getpid())).touch()
    return lock(path, on_wait)

def take_time(*arguments, **options):
    while len(os.listdir(sys.argv[4])) < 2:
        time.sleep(0.01)
    return slow(*arguments, **options)

flows.leases.file_lock.hold = note_and_try
flows.artifacts.cache.fetch_verified = take_time
"""
    + USER
)


def test_two_processes_that_fetch_at_once_fetch_once(store, tmp_path, manifest):
    (tmp_path / "tried").mkdir()
    words = (tmp_path / "store", tmp_path / "cache", manifest.fingerprint, tmp_path / "tried")
    users = [run_python(SLOW_USER, *words) for _ in range(2)]
    for user in users:
        say(user, "go")
    assert [read_line(user) for user in users] == ["ready", "ready"]
    counts = sorted(int((read_line(user) or "using -1").split()[1]) for user in users)
    for user in users:
        user.kill()
        user.communicate()
    assert counts == [0, 4]


def test_what_another_process_uses_is_not_dropped_until_that_process_ends(store, tmp_path):
    manifests = [publish_block(store, tmp_path, number) for number in range(2)]
    user = run_python(USER, tmp_path / "store", tmp_path / "cache", manifests[0].fingerprint)
    say(user, "go")
    assert read_line(user) == "ready"
    assert read_line(user) == "using 4"
    with Cache(tmp_path / "cache", 0) as cache:
        fetch(store, manifests[1], cache)
    assert cached(cache, *manifests) == [0, 1]
    user.kill()
    user.communicate()
    with Cache(tmp_path / "cache", 0) as cache:
        cache.make_room()
    assert cached(cache, *manifests) == []


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from flows.artifacts.cache import Cache

def die_half_way(path, **options):
    if sys.argv[2] in str(path) and Path(path).exists():
        (next(Path(path).glob("files/*.rows"))).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

shutil.rmtree = die_half_way
Cache(Path(sys.argv[1]), 0).make_room()
"""


def test_a_process_killed_while_it_makes_room_leaves_no_half_copy_under_its_name(
    store, cache, tmp_path
):
    manifest = publish_block(store, tmp_path, 0)
    directory = fetch(store, manifest, cache)
    cache.close()
    killed = run_python(KILLED, cache.directory, directory.name)
    killed.communicate()
    assert killed.returncode == -9
    assert not directory.exists()
    assert names(directory.parent) == [f".{directory.name}.new"]
    store.fetched.clear()
    assert fetch(store, manifest, cache) == directory
    assert len(store.fetched) == 4
    assert names(directory.parent) == [directory.name]


WORKER = """
import random, sys
from pathlib import Path
from flows.artifacts.publish import find_manifest
from flows.artifacts.cache import Cache, fetch
from flows.identity.ref import ArtifactRef
from infra.storage.local import LocalStore

store, generator = LocalStore(Path(sys.argv[1])), random.Random(sys.argv[3])
manifests = [find_manifest(store, ArtifactRef("rows", text)) for text in sys.argv[4:]]
for _ in range(40):
    number = generator.randrange(len(manifests))
    with Cache(Path(sys.argv[2]), 10 * 4096) as cache:
        files = fetch(store, manifests[number], cache) / "files"
        for _ in range(3):
            assert (files / "train.rows").read_text() == str(number) * 8192
            assert (files / "rows.json").read_text() == "{}"
print("well")
"""


def test_processes_that_fetch_use_and_drop_at_once_never_see_a_copy_go(store, tmp_path):
    prints = [publish_block(store, tmp_path, number).fingerprint for number in range(4)]
    workers = [
        run_python(WORKER, tmp_path / "store", tmp_path / "cache", seed, *prints)
        for seed in range(3)
    ]
    assert [worker.communicate()[0] for worker in workers] == ["well\n"] * 3


def test_unfinished_fetches_take_room_and_are_dropped_too(store, cache, tmp_path):
    manifest = publish_block(store, tmp_path, 0)
    with pytest.raises(KeyboardInterrupt):
        fetch(DyingStore(tmp_path / "store"), manifest, cache)
    with Cache(cache.directory, 0) as other:
        other.make_room()
    assert len(names(cache.directory / "rows")) == 1  # it is in use
    cache.close()

    def is_empty() -> bool:
        with Cache(cache.directory, 0) as other:
            other.make_room()
        return names(cache.directory / "rows") == []

    # Not at once: a process that a thread of another test starts has our locks until it executes.
    wait_until(is_empty)
