"""Two stores: a run in one of them, and nothing yet in the other."""

from pathlib import Path

import pytest

from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from tests.support.flows.senders import Sink, make_run


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Sink:
    return Sink(tmp_path / "target")


@pytest.fixture
def artifacts(source: LocalStore, tmp_path: Path) -> tuple[Manifest, Manifest]:
    return make_run(source, tmp_path)
