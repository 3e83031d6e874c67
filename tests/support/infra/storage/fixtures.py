"""Fake S3 servers, and stores on them."""

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3transfer.utils import ChunksizeAdjuster  # pyright: ignore[reportMissingTypeStubs]

from infra.retry import RetryPolicy
from infra.storage.s3 import client
from infra.storage.s3 import store as s3_store
from infra.storage.s3.store import S3Store
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import Fault, Quirk
from tests.support.infra.storage.s3_server import client_environment

PARTS = 12  # of a large file
IMPATIENT = RetryPolicy(tries=8, first_wait=0.005, longest_wait=0.05)
MakeFake = Callable[..., FakeS3]


@pytest.fixture
def make_fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeFake]:
    """Starts a server that misbehaves as told; the environment is that of its client."""
    made: list[FakeS3] = []

    def make(*ways: Quirk | Fault) -> FakeS3:
        fake = FakeS3(
            *(way for way in ways if isinstance(way, Quirk)),
            faults=tuple(way for way in ways if isinstance(way, Fault)),
        )
        made.append(fake)
        for name, value in client_environment(fake.endpoint).items():
            monkeypatch.setenv(name, value)
        return fake

    yield make
    for fake in made:
        fake.stop()


@pytest.fixture
def fake(make_fake: MakeFake) -> FakeS3:
    """A server that behaves until told otherwise."""
    return make_fake()


def store_on(fake: FakeS3, *, retry_policy: RetryPolicy = IMPATIENT) -> S3Store:
    """An empty store."""
    return S3Store(f"s3://{fake.bucket}/{uuid.uuid4().hex}", retry_policy=retry_policy)


def set_part(setattr: Callable[[Any, str, Any], None], part: int) -> None:
    """Let large objects go in parts of so many bytes, also below the 5 MiB that S3 asks for."""
    setattr(client, "PART", part)
    setattr(s3_store, "PART", part)
    setattr(ChunksizeAdjuster, "_adjust_for_chunksize_limits", lambda self, size: size)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a part, so that small objects go in parts."""
    part = 1 << 16
    set_part(monkeypatch.setattr, part)
    return part


@pytest.fixture
def large(tmp_path: Path, small_parts: int) -> Path:
    """A file of twelve parts, the last one short. No byte is 0, as a missing one would be."""
    path = tmp_path / "large"
    path.write_bytes(random.Random(1).randbytes(PARTS * small_parts - 5).replace(b"\0", b"\1"))
    return path
