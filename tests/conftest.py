"""A real S3 server for every test that asks for one, and Ctrl-C as a terminal gives it."""

import signal
import uuid
from collections.abc import Iterator

import pytest

from infra.storage.base import Store
from infra.storage.open import open_store
from tests.infra.storage.s3_server import S3Server, start_s3

BUCKET = "nanochat"

# A shell without job control has what it starts in the background ignore Ctrl-C, and so would every
# program that a test starts, to see what Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server with the bucket `nanochat`; one for the whole session."""
    server = start_s3(tmp_path_factory.mktemp("s3"))
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.stop()


@pytest.fixture
def s3_store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store on the server; the environment is that of its client."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")
