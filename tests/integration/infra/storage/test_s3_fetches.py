"""Objects come whole or not at all, several parts at once."""

import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.parallel import THREADS
from infra.storage.base import Store
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fake_s3 import FakeS3, Object
from tests.support.infra.storage.fixtures import (
    PARTS,
    MakeFake,
    store_on,
)
from tests.support.infra.storage.misbehaviour import Answer, Fault, Kind, Quirk, Request


def test_an_object_that_is_replaced_under_a_fetch_comes_whole_and_new(
    fake: FakeS3, large: Path, small_parts: int, tmp_path: Path
) -> None:
    store = store_on(fake)
    store.upload("large", large)
    newer = os.urandom(large.stat().st_size)
    answer, count = fake.answer, iter(range(1000))

    def replacing(request: Request) -> Answer:
        if request.verb == "GET" and next(count) == 4:
            fake.objects[request.key] = Object(data=newer, etag="newer", written=time.time())
        return answer(request)

    fake.answer = replacing
    fake.requests.clear()
    store.fetch("large", tmp_path / "target", size=large.stat().st_size)
    assert (tmp_path / "target").read_bytes() == newer
    assert fake.count("HEAD") == 2, "it was begun again, once"


def test_an_object_that_never_stays_the_same_is_given_up(
    fake: FakeS3, large: Path, small_parts: int, tmp_path: Path
) -> None:
    store = store_on(fake)
    store.upload("large", large)
    answer, count = fake.answer, iter(range(10_000))

    def changing(request: Request) -> Answer:
        found = fake.objects[request.key]
        fake.objects[request.key] = replace(found, etag=f"version{next(count)}")
        return answer(request)

    fake.answer = changing
    with pytest.raises(StoreError, match=r"was replaced while it was fetched \(3 tries"):
        store.fetch("large", tmp_path / "target", size=large.stat().st_size)
    assert not (tmp_path / "target").exists()


def test_a_store_without_ranges_is_refused_in_one_line(
    make_fake: MakeFake, large: Path, small_parts: int, tmp_path: Path
) -> None:
    fake = make_fake(Quirk.IGNORES_RANGES)
    store = store_on(fake)
    store.upload("large", large)
    fake.requests.clear()
    with pytest.raises(StoreError, match="answers a range request with the whole object"):
        store.fetch("large", tmp_path / "target", size=large.stat().st_size)
    assert not (tmp_path / "target").exists()
    assert fake.count("GET") <= THREADS, "it is not repeated"


@pytest.mark.parametrize("kind", [Kind.CUT, Kind.SHORTEN, Kind.RESET])
def test_a_part_that_comes_short_is_fetched_again(
    fake: FakeS3, large: Path, small_parts: int, tmp_path: Path, kind: Kind
) -> None:
    store = store_on(fake)
    store.upload("large", large)
    fake.requests.clear()
    fake.faults.append(Fault(kind=kind, verb="GET", times=7))
    store.fetch("large", tmp_path / "target", size=large.stat().st_size)
    assert (tmp_path / "target").read_bytes() == large.read_bytes()
    assert fake.count("GET") == PARTS + 7


def test_a_disk_that_is_full_ends_a_fetch_at_once_and_is_reported(
    fake: FakeS3, large: Path, small_parts: int, tmp_path: Path
) -> None:
    store = store_on(fake)
    store.upload("large", large)
    fake.requests.clear()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * small_parts, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written: file too large") as caught:
            store.fetch("large", tmp_path / "target", size=large.stat().st_size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free some space" in (caught.value.hint or "")
    assert fake.count("GET") <= PARTS
    assert not (tmp_path / "target").exists()


def test_a_directory_that_is_not_there_is_reported_as_that(fake: FakeS3, tmp_path: Path) -> None:
    store = store_on(fake)
    store.put("a", b"x")
    with pytest.raises(StoreError, match="cannot be written: no such file or directory"):
        store.fetch("a", tmp_path / "none" / "target", size=1)


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
    assert copy_and_measure(s3_store, tmp_path, megabytes=30, part=1 << 19) < 19


def copy_and_measure(s3_store: Store, tmp_path: Path, *, megabytes: int, part: int) -> float:
    """Return the MiB that a process took to upload and fetch so many megabytes."""
    source, target = tmp_path / "source", tmp_path / "target"
    block = os.urandom(1_000_000)
    with source.open("wb") as file:
        for number in range(megabytes):
            file.write(number.to_bytes(8, "big") + block[8:])
    words = [sys.executable, "-c", MEASURED, s3_store.url, str(source), str(target), str(part)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert _same(source, target)
    return float(done.stdout)


def _same(one: Path, other: Path) -> bool:
    return subprocess.run(["cmp", one, other], check=False).returncode == 0
