"""A fake S3 server with a store on it, and a large file to send."""

import random
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from s3transfer.utils import ChunksizeAdjuster  # pyright: ignore[reportMissingTypeStubs]

from infra.retry import RetryPolicy
from infra.storage.s3 import client
from infra.storage.s3 import store as s3_store
from infra.storage.s3.store import S3Store
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import Answer, Fault, Kind, Quirk, Request
from tests.support.infra.storage.s3_server import client_environment

PARTS = 12  # of a large file
PART = 1 << 16  # bytes of a part here
IMPATIENT = RetryPolicy(tries=8, first_wait=0.005, longest_wait=0.05)


class Rig(FakeS3):
    """A fake S3 server, a store on it, and a file of PARTS parts."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    @cached_property
    def store(self) -> S3Store:
        """Return an empty store."""
        return self.new_store()

    @cached_property
    def large(self) -> Path:
        """Return a file whose last part is short. No byte is 0, as a missing one would be."""
        data = random.Random(1).randbytes(PARTS * PART - 5).replace(b"\0", b"\1")
        path = self.directory / "large"
        path.write_bytes(data)
        return path

    @property
    def target(self) -> Path:
        """Return where `fetch` writes."""
        return self.directory / "target"

    def new_store(self, policy: RetryPolicy = IMPATIENT) -> S3Store:
        """Return another empty store."""
        return S3Store(f"s3://{self.bucket}/{uuid.uuid4().hex}", retry_policy=policy)

    def misbehave(self, *ways: Quirk | Fault) -> "Rig":
        """Add to the ways in which the server differs from a good one."""
        self.quirks |= {way for way in ways if isinstance(way, Quirk)}
        self.faults += [way for way in ways if isinstance(way, Fault)]
        return self

    def refuse(self, verb: str, status: int, code: str, *, times: int = 1 << 30) -> None:
        """Refuse requests from here on."""
        self.misbehave(Fault(kind=Kind.REFUSE, verb=verb, status=status, code=code, times=times))

    def serve_page(
        self, verb: str, status: int, headers: dict[str, str] | None = None, times: int = 1 << 30
    ) -> None:
        """Answer with a web page from here on."""
        fault = Fault(kind=Kind.PAGE, verb=verb, status=status, headers=headers or {}, times=times)
        self.misbehave(fault)

    def intercept(self, change: Callable[[Request, Callable[[Request], Answer]], Answer]) -> None:
        """Have `change` answer each request; it may ask what the server would answer."""
        answer = self.answer
        self.answer = lambda request: change(request, answer)

    def data(self, key: str) -> bytes:
        """Return the bytes of an object of the store, as the server has them."""
        return self.objects[f"{self.store.prefix}{key}"].data

    def upload(self) -> None:
        """Upload the large file, then count requests anew."""
        self.store.upload("large", self.large)
        self.requests.clear()

    def fetch(self) -> bytes:
        """Fetch the large file; return its bytes."""
        self.store.fetch("large", self.target, size=self.large.stat().st_size)
        return self.target.read_bytes()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A server that behaves, in small parts; the environment is that of its client."""
    set_part(monkeypatch.setattr, PART)
    (tmp_path / "rig").mkdir()
    rig = Rig(tmp_path / "rig")
    for name, value in client_environment(rig.endpoint).items():
        monkeypatch.setenv(name, value)
    yield rig
    rig.stop()
    vars(rig).pop("store", None)  # a client takes megabytes, and its server is part of cycles


def set_part(setattr: Callable[[Any, str, Any], None], part: int) -> None:
    """Let large objects go in parts of so many bytes, also below the 5 MiB that S3 asks for."""
    setattr(client, "PART", part)
    setattr(s3_store, "PART", part)
    setattr(ChunksizeAdjuster, "_adjust_for_chunksize_limits", lambda self, size: size)
