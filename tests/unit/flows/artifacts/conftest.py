"""A store and a cache; two stores, with a run in one of them and nothing yet in the other."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.artifacts.cache import Cache
from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from tests.support.flows.rows import GIGABYTE, publish_rows
from tests.support.flows.senders import make_run
from tests.support.flows.stores import CountingStore

# What becomes of a file that is damaged.
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "bit": lambda data: bytes([data[0] ^ 4, *data[1:]]),
    "truncated": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
}


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    """An empty store, which counts what is fetched from it."""
    return CountingStore(tmp_path / "store")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", GIGABYTE) as cache:
        yield cache


@pytest.fixture
def manifest(store: CountingStore, tmp_path: Path) -> Manifest:
    """An artifact in that store."""
    return publish_rows(store, tmp_path).manifest


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "target")


@pytest.fixture
def artifacts(source: LocalStore, tmp_path: Path) -> tuple[Manifest, Manifest]:
    return make_run(source, tmp_path)
