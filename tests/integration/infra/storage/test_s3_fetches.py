"""Objects come whole or not at all, several parts at once."""

import hashlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from infra.storage.base import BadObject, ObjectNotFound, Store
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fake_s3 import Object
from tests.support.infra.storage.fixtures import PART, PARTS, Rig
from tests.support.infra.storage.misbehaviour import Answer, Fault, Kind, Request
from tests.support.infra.storage.verbs import READS


@pytest.mark.parametrize("replaced", [1, 1000])
def test_an_object_that_is_replaced_under_a_fetch_comes_whole_or_is_given_up(
    rig: Rig, replaced: int
) -> None:
    rig.upload()
    newest, number = b"", count()

    def replace(request: Request, answer: Callable[[Request], Answer]) -> Answer:
        nonlocal newest
        if request.verb == "GET" and 4 <= next(number) < 4 + replaced:
            newest = os.urandom(rig.large.stat().st_size)
            etag = hashlib.md5(newest).hexdigest()
            rig.objects[request.key] = Object(data=newest, etag=etag, written=time.time())
        return answer(request)

    rig.intercept(replace)
    if replaced == 1:
        assert rig.fetch() == newest
        assert rig.count("HEAD") == 2, "it was begun again, once"
        return
    with pytest.raises(StoreError, match="was replaced while it was fetched"):
        rig.fetch()
    assert rig.count("HEAD") == 3
    assert not rig.target.exists()


def test_a_version_of_s3transfer_that_asks_for_the_size_itself_is_answered(rig: Rig) -> None:
    rig.upload()
    rig.store.client.meta.config.response_checksum_validation = "when_supported"
    assert rig.fetch() == rig.large.read_bytes()
    assert rig.count("HEAD") == 2


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.RESET])
def test_a_part_that_comes_short_is_fetched_again(rig: Rig, kind: Kind) -> None:
    rig.upload()
    rig.misbehave(Fault(kind=kind, verb="GET", times=7))
    assert rig.fetch() == rig.large.read_bytes()
    assert rig.count("GET") == PARTS + 7


def test_a_disk_that_is_full_ends_a_fetch_at_once_and_is_reported(rig: Rig) -> None:
    rig.upload()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PART, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written: file too large") as caught:
            rig.fetch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free some space" in (caught.value.hint or "")
    assert rig.count("GET") <= PARTS
    assert not rig.target.exists()


def test_a_directory_that_is_not_there_is_reported_as_that(rig: Rig, tmp_path: Path) -> None:
    rig.store.put("a", b"x")
    with pytest.raises(StoreError, match="cannot be written: no such file or directory"):
        rig.store.fetch("a", tmp_path / "none" / "target", size=1)


def test_an_object_that_is_absent_is_asked_for_once(rig: Rig) -> None:
    for name in ("get", "get of a size", "get_stored"):
        rig.requests.clear()
        with pytest.raises(ObjectNotFound):
            READS[name](rig.store, "a", rig.target)
        assert len(rig.requests) == 1


def test_a_body_larger_than_announced_before_writes_nothing_and_is_not_asked_for_again(
    rig: Rig,
) -> None:
    rig.store.put("a", b"0123456789")

    def grow(request: Request, answer: Callable[[Request], Answer]) -> Answer:
        found = answer(request)
        if request.verb == "GET":
            found.body *= 1000
        return found

    rig.intercept(grow)
    with pytest.raises(BadObject, match="has 10000 bytes, expected are 10 at most"):
        rig.store.fetch("a", rig.target, size=10)
    assert rig.count("GET") == 1
    assert all(path.stat().st_size < 1000 for path in rig.directory.iterdir())


# Uploads and fetches a file; prints the most memory that it ever had, in MiB.
MEASURED = """
import re, sys
from pathlib import Path
from infra.storage.open import open_store
from tests.support.infra.storage.fixtures import set_part

def peak():
    # Not ru_maxrss, which begins with that of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

url, source, target, part = sys.argv[1:]
set_part(setattr, int(part))
store = open_store(url)
store.put("warm", b"")
store.get("warm")
before = peak()
store.upload("large", Path(source))
store.fetch("large", Path(target), size=Path(source).stat().st_size)
print((peak() - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_object(s3_store: Store, tmp_path: Path) -> None:
    """Measured: 9.5 MiB, and 28.5 with the object in one part."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(30_000_000))
    argv = [sys.executable, "-c", MEASURED, s3_store.url, str(source), str(target), str(1 << 19)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert source.read_bytes() == target.read_bytes()
    assert float(done.stdout) < 19
