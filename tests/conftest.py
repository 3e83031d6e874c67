"""For all tests: real servers on request, and which worker runs which file."""

import atexit
import contextlib
import functools
import gc
import os
import shutil
import signal
import sqlite3
import tempfile
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from xdist.scheduler import LoadScopeScheduling

from flows.identity import fingerprint
from infra.prefect.access import AUTH
from infra.prefect.server import Server, client_environment, stop_server
from infra.storage.base import Store
from infra.storage.open import open_store
from tests.support.infra.prefect_server import ensure_server
from tests.support.infra.storage.s3_server import S3Server, start_s3
from tests.support.transcripts import transcript

__all__ = ["transcript"]

BUCKET = "nanochat"
# Their tests change the deployments and automations of the one server.
REGISTERED = (
    "tests/integration/deployments/",
    "tests/integration/flows/evals/test_flow.py",
    "tests/integration/infra/stack/test_resuming.py",
)
TRANSFORMERS = (
    "tests/integration/bench/test_core_gpt2.py",
    "tests/integration/nanochat_core/evaluate/test_foreign.py",
    "tests/integration/nanochat_core/interop/test_transformers_files.py",
)
PREFECT = "prefect-server"  # in the directory of a run
SHARED = pytest.StashKey[Path]()

# Threads of numerical libraries. Tests run side by side: threads that wait for each other's time
# slices take ten times as long. Set before torch is imported; your own setting is kept.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control has what it starts in the background ignore Ctrl-C, and so would every
# program that a test starts, to see what Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def scans_once() -> Iterator[None]:
    """Scan each source once a process: most homes of tests are fresh and so know no scan of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "scan", functools.cache(fingerprint.scan))
        yield


@pytest.fixture(autouse=True)
def own_prefect() -> Iterator[None]:
    """Undo what a command did to this process's Prefect, which it points at its home's server."""
    before = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}
    yield
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Path:
    """Return a directory that all workers of a run have in common."""
    return pytestconfig.stash[SHARED]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server with the bucket `nanochat`."""
    server = start_s3(tmp_path_factory.mktemp("s3-server"))
    server.make_bucket(BUCKET)
    yield server
    server.kill()


@pytest.fixture
def s3_store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store on the server; the environment is that of its client."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def prefect_database(shared: Path) -> Path:
    """The history of a Prefect server that has just started: to make one costs 10 s of CPU.

    The log of that start, the only one of a test from no history, lies beside it.
    """
    path = shared / "prefect.db"
    with FileLock(shared / "prefect.lock"), pytest.MonkeyPatch.context() as patch:
        if not path.exists():
            patch.setenv(AUTH, "")  # not that of a server that an earlier test started
            patch.setenv("PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS", "5")  # 60 to wait for
            ensure_server(shared / PREFECT)
            shutil.copy(shared / PREFECT / "prefect" / "server.log", path.with_suffix(".log"))
            history = sqlite3.connect(shared / PREFECT / "prefect" / path.name)
            with contextlib.closing(history), contextlib.closing(sqlite3.connect(path)) as copy:
                history.backup(copy)
    return path


@pytest.fixture(scope="session")
def authority(shared: Path) -> Path:
    """A file with one certificate: each client of HTTP reads them all, for 50 ms of CPU."""
    import certifi

    end = "-----END CERTIFICATE-----\n"
    path = shared / f"authority-{os.getpid()}.pem"
    path.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end)
    return path


@pytest.fixture(scope="session")
def server(shared: Path, prefect_database: Path, authority: Path) -> Iterator[Server]:
    """One Prefect server for all workers of a run, and this process's Prefect pointed at it."""
    home = shared / PREFECT
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(AUTH, "")
        server = ensure_server(home)
        patch.setenv("PREFECT_API_SSL_CERT_FILE", str(authority))
        for name, value in client_environment(home, server.api_url, console_logs=False).items():
            patch.setenv(name, value)
        from prefect.context import SyncClientContext
        from prefect.settings import (
            PREFECT_API_AUTH_STRING,
            PREFECT_API_URL,
            PREFECT_HOME,
            temporary_settings,
        )

        patch.setattr("flows.orchestration.client.ANSWER_SECONDS", 100.0)  # it may be busy
        settings = {
            PREFECT_API_URL: server.api_url,
            PREFECT_API_AUTH_STRING: os.environ[AUTH],
            PREFECT_HOME: str(home),
        }
        with temporary_settings(settings), SyncClientContext():  # one client for all tests
            yield server
            _send_what_is_queued()


class FileScheduling(LoadScopeScheduling):
    """Has one worker run a whole file, whose fixtures are then made once, or a group of files."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(TRANSFORMERS):  # which takes five seconds to import
            return "transformers"
        # Files that change what is registered in the one Prefect server.
        return "registered" if nodeid.startswith(REGISTERED) else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests on a GPU warn: warnings of torch's compiler or of a kernel's package, raised as
    errors, would make a backend seem unable to run."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep the garbage collector from all that is imported, a third of the CPU of a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Or DuckDB's bindings print at exit that all their types were leaked.
        atexit.register(gc.unfreeze)
        gc.unfreeze = lambda: None  # a training loop's end would give it all back
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch  # here: most tests do without

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Have files scheduled, not tests; pytest-xdist's own groups need an older pytest."""
    return FileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory that the workers share."""
    given = getattr(config, "workerinput", {}).get("shared")
    config.stash[SHARED] = Path(given or tempfile.mkdtemp(prefix="nanochat-tests-"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker the directory."""
    node.workerinput["shared"] = str(node.config.stash[SHARED])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Stop the Prefect server; its logs stay if a test failed."""
    shared = session.config.stash[SHARED]
    if hasattr(session.config, "workerinput"):
        return
    stop_server(shared / PREFECT)
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(shared, ignore_errors=True)


def _send_what_is_queued() -> None:
    """Prefect would try for minutes to reach a server that is gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all()
    EventsWorker.drain_all()
