"""Real servers, S3 and Prefect, for tests that ask for one, and Ctrl-C as a terminal gives it."""

import signal
import uuid
from collections.abc import Iterator

import pytest

from infra.prefect.access import auth
from infra.prefect.records import Server
from infra.prefect.server import client_environment, ensure_server, stop_server
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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One Prefect server for all tests, and this process's Prefect pointed at it."""
    home = tmp_path_factory.mktemp("server")
    server = ensure_server(home)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in client_environment(home, server.api_url, console_logs=False).items():
            patch.setenv(name, value)
        from prefect.settings import (
            PREFECT_API_AUTH_STRING,
            PREFECT_API_URL,
            PREFECT_HOME,
            temporary_settings,
        )

        settings = {
            PREFECT_API_URL: server.api_url,
            PREFECT_API_AUTH_STRING: auth(),
            PREFECT_HOME: str(home),
        }
        with temporary_settings(settings):
            yield server
            _send_what_is_queued()
    stop_server(home)


def _send_what_is_queued() -> None:
    """Prefect would try for minutes to reach a server that is gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all()
    EventsWorker.drain_all()
