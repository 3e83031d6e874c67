"""What every store promises: in a directory, on a real S3 server, on bad ones, in simulations.

The stores of tests keep the promises too, so that what runs on them would run on a real one.
"""

import functools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from infra.storage.base import BadObject, ObjectNotFound, OnBytes, Store, ignore_bytes
from infra.storage.local import LocalStore
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.conftest import BUCKET
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import IMPATIENT, PART, set_part
from tests.support.infra.storage.misbehaviour import Fault, Kind
from tests.support.infra.storage.s3_server import S3Server, client_environment
from tests.support.infra.storage.verbs import OF_KEYS, READS
from tests.support.reliability.memory_store import Calm, MemoryStore
from tests.support.reliability.sim_s3 import SimS3Store
from tests.support.reliability.sim_store import Objects
from tests.support.reliability.sim_world import Process

RACES = int(os.environ.get("NANOCHAT_TEST_RACES", "2"))  # of each kind on each store
# Bad servers, and the promises that each can break, by words of the names of tests. A directory, a
# real server and one that behaves are asked for all promises.
ALL = ("",)
PUTS = ("was_put", "put_if_absent", "put_if_same", "_race_", "_a_file_")
GETS = (*PUTS, "larger_than", "largest_size")
FILES = ("_a_file_",)
LISTS = ("deleting", "listing")
BAD_SERVERS = {
    "lists-no-uploads": (FILES, Fault(kind=Kind.REFUSE, verb="GET uploads", status=501)),
    "loses-answers-to-put": (PUTS, Fault(kind=Kind.LOSE, verb="PUT", every=3)),
    "fails-after-put": (PUTS, Fault(kind=Kind.REFUSE_AFTER, verb="PUT", every=3, status=500)),
    "flips-put": (PUTS, Fault(kind=Kind.FLIP_REQUEST, verb="PUT", every=3)),
    "flips-parts": (FILES, Fault(kind=Kind.FLIP_REQUEST, verb="PUT partNumber", every=3)),
    "loses-parts": (FILES, Fault(kind=Kind.LOSE, verb="PUT partNumber", every=2)),
    "loses-complete": (FILES, Fault(kind=Kind.LOSE, verb="POST uploadId", every=2)),
    "errs-in-complete": (FILES, Fault(kind=Kind.ERROR_200, verb="POST uploadId", every=2)),
    "errs-in-list": (LISTS, Fault(kind=Kind.ERROR_200, verb="GET list-type", every=2)),
    "cuts-gets": (GETS, Fault(kind=Kind.CUT, verb="GET", every=2)),
    "cuts-lists": (LISTS, Fault(kind=Kind.CUT, verb="GET list-type", every=2)),
    "conflicts": (
        *(PUTS, Fault(kind=Kind.REFUSE, verb="PUT", every=3, status=409, code="OperationAborted")),
    ),
    "slow-down": (ALL, Fault(kind=Kind.REFUSE, every=5)),
    "resets": (ALL, Fault(kind=Kind.RESET, every=5)),
    "loses-everything-often": (ALL, Fault(kind=Kind.LOSE, every=5)),
}


def open_linked(path: Path) -> LocalStore:
    """Return a store whose directory is a link."""
    path.with_name("linked").mkdir()
    path.symlink_to("linked")
    return LocalStore(path)


def open_calm_s3() -> SimS3Store:
    """Return the S3 store of simulated histories, in a world in which nothing goes wrong."""
    world: Any = Calm()
    return SimS3Store(Objects(world), Process("contract", home="home", skew=0.0))


# Stores that need no server: what opens one at a path.
LOCAL: dict[str, Callable[[Path], Any]] = {
    "local": LocalStore,
    "linked": open_linked,
    "memory": lambda path: MemoryStore(),
    "simulated S3": lambda path: open_calm_s3(),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A store and a prefix of it that is the test's own."""

    name: str
    store: Store
    root: str = ""
    fake: FakeS3 | None = None

    def key(self, name: str) -> str:
        """A key of the test's own."""
        return f"{self.root}/{name}"


NO_REQUESTS = "not_every_store_can_hold"  # of a test that no server can change
# What the stores of tests are asked for: memory has no threads' races in simulated time.
_RECORDS = ("was_put", "put_if_absent", "put_if_same", "is_missing", "deleting", "listing")
FAKES = {
    "memory": (*_RECORDS, "_race_", "larger_than", "_a_file_", "can_hold"),
    "simulated S3": _RECORDS,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask each store for the promises that it can break."""
    if "server" not in metafunc.fixturenames:
        return
    name = metafunc.function.__name__
    words = {store: FAKES.get(store, ALL) for store in LOCAL}
    words |= {"ministack": ALL, "plain": ALL}
    if NO_REQUESTS not in name:
        words |= {server: of for server, (of, _) in BAD_SERVERS.items()}
    stores = [store for store, of in words.items() if any(word in name for word in of)]
    metafunc.parametrize("server", stores, indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A store of each kind, for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        set_part(patch.setattr, PART)
        if request.param in LOCAL:
            path = tmp_path_factory.mktemp("contract") / "store"
            yield Place(name=request.param, store=LOCAL[request.param](path))
            return
        fake, environment = None, {}
        if request.param == "ministack":
            server: S3Server = request.getfixturevalue("s3_server")
            environment = server.add_user("contract")  # whose signatures are checked
        else:
            faults = [BAD_SERVERS[request.param][1]] if request.param in BAD_SERVERS else []
            fake = FakeS3(faults=faults, bucket=BUCKET)
            environment = client_environment(fake.endpoint)
        for name, value in environment.items():
            patch.setenv(name, value)
        store = S3Store(f"s3://{BUCKET}/contract-{uuid.uuid4().hex}", retry_policy=IMPATIENT)
        yield Place(name=request.param, store=store, fake=fake)
        if fake:
            fake.stop()


@pytest.fixture
def place(server: Place) -> Place:
    """A prefix of one's own."""
    return replace(server, root=f"t{uuid.uuid4().hex[:8]}")


def put_file(
    place: Place, directory: Path, *, size: int, on_bytes: OnBytes = ignore_bytes
) -> bytes:
    """Upload a file of random bytes as "large"."""
    data = os.urandom(size)
    (directory / "source").write_bytes(data)
    place.store.upload(place.key("large"), directory / "source", on_bytes=on_bytes)
    return data


def test_what_was_put_is_what_is_got(place: Place) -> None:
    place.store.put(place.key("a"), b"one")
    place.store.put(place.key("a"), b"two two")
    assert place.store.get(place.key("a")) == b"two two"
    assert place.store.head(place.key("a")).size == 7
    place.store.put(place.key("empty"), b"")
    assert place.store.get(place.key("empty")) == b""


def test_the_first_put_if_absent_wins_and_may_say_so_again(place: Place) -> None:
    key = place.key("manifest.json")
    assert place.store.put_if_absent(key, b"first")
    assert not place.store.put_if_absent(key, b"second")
    assert place.store.put_if_absent(key, b"first"), "the answer to our own write may be lost"
    assert place.store.get(key) == b"first"


def test_put_if_same_replaces_what_was_read_and_nothing_else(place: Place) -> None:
    key, store = place.key("lease.json"), place.store
    assert not store.put_if_same(key, b"0", version="0" * 32)
    store.put(key, b"1")
    read = store.get_stored(key)
    assert read.data == b"1"
    assert 0 <= read.age < 300
    assert store.put_if_same(key, b"2", version=read.version)
    assert not store.put_if_same(key, b"3", version=read.version)
    assert store.put_if_same(key, b"2", version=read.version), "ours is there already"
    assert store.get(key) == b"2"
    newer = store.get_stored(key)
    store.delete(key)
    assert not store.put_if_same(key, b"4", version=newer.version)
    with pytest.raises(ObjectNotFound):
        store.get(key)


def race(write: Callable[[int], bool], *, writers: int = 8) -> list[int]:
    """Which of several writers who begin together won."""
    together = threading.Barrier(writers)

    def run(number: int) -> bool:
        together.wait()
        return write(number)

    with ThreadPoolExecutor(writers) as pool:
        return [number for number, won in enumerate(pool.map(run, range(writers))) if won]


@pytest.mark.parametrize("number", range(RACES))
@pytest.mark.parametrize("exists", [False, True])
def test_one_of_eight_writers_wins_a_race_and_its_bytes_stay(
    place: Place, number: int, *, exists: bool
) -> None:
    key, store, write = place.key("a"), place.store, place.store.put_if_absent
    if exists:
        store.put(key, b"before")
        write = functools.partial(store.put_if_same, version=store.get_stored(key).version)
    won = race(lambda n: write(key, b"%d" % n))
    assert len(won) == 1
    assert store.get(key) == b"%d" % won[0]


def test_what_is_missing_is_missing_whatever_is_asked_of_it(place: Place, tmp_path: Path) -> None:
    for use in READS.values() if place.name != "simulated S3" else [READS["get"], READS["head"]]:
        with pytest.raises(ObjectNotFound):
            use(place.store, place.key("none"), tmp_path / "none")
    place.store.delete(place.key("none"))
    assert list(tmp_path.iterdir()) == []


def test_deleting_removes_one_object(place: Place) -> None:
    place.store.put(place.key("a"), b"")
    place.store.put(place.key("b"), b"")
    place.store.delete(place.key("a"))
    assert [entry.key for entry in place.store.list(place.key(""))] == [place.key("b")]


def test_listing_is_by_prefix_and_in_the_order_of_keys(place: Place) -> None:
    for name in ("b/x", "a/y/deep", "a/x", "ab", "a-b"):
        place.store.put(place.key(name), b"12")

    def names(prefix: str) -> list[str]:
        found = place.store.list(place.key(prefix))
        return [entry.key.removeprefix(f"{place.root}/") for entry in found]

    assert names("") == ["a-b", "a/x", "a/y/deep", "ab", "b/x"]
    assert names("a") == ["a-b", "a/x", "a/y/deep", "ab"]
    assert names("a/") == ["a/x", "a/y/deep"]
    assert names("none/") == []
    (entry,) = place.store.list(place.key("ab"))
    assert entry.size == 2
    assert abs(entry.modified - place.store.head(place.key("ab")).modified) < 2


@pytest.mark.parametrize("size", [0, PART, PART + 1, 7 * PART + 123])
def test_a_file_goes_in_and_comes_out_whole_and_read_only(
    place: Place, tmp_path: Path, size: int
) -> None:
    """Over an older one of the same size, there and here; each byte is reported once."""
    target, sent, fetched = tmp_path / "target", [0], [0]
    for _ in range(2):
        data = put_file(place, tmp_path, size=size, on_bytes=sent.append)
        place.store.fetch(place.key("large"), target, size=size, on_bytes=fetched.append)
        assert target.read_bytes() == data
        assert target.stat().st_mode & 0o777 == 0o444
    assert sum(sent) == sum(fetched) == 2 * size
    assert place.store.head(place.key("large")).size == size
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}
    assert place.store.abort_stale_uploads(before=0.0) == 0
    if place.fake and place.name != "loses-everything-often":
        assert place.fake.uploads == {}


def test_an_object_larger_than_expected_is_refused_before_a_byte_is_written(
    place: Place, tmp_path: Path
) -> None:
    size = len(put_file(place, tmp_path, size=3 * PART))
    with pytest.raises(BadObject, match=f"has {size} bytes, expected are {size - 1} at most"):
        place.store.fetch(place.key("large"), tmp_path / "target", size=size - 1)
    with pytest.raises(BadObject, match="expected are 9 at most"):
        place.store.get(place.key("large"), size=9)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    assert len(place.store.get(place.key("large"), size=size)) == size


def test_a_record_has_a_largest_size(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("base", "local", "s3.store"):
        monkeypatch.setattr(f"infra.storage.{module}.MAX_RECORD", 10)
    place.store.put(place.key("a"), b"0123456789")
    assert place.store.get(place.key("a")) == place.store.get_stored(place.key("a")).data
    place.store.put(place.key("a"), b"0123456789x")
    for read in (place.store.get, place.store.get_stored):
        with pytest.raises(BadObject, match="has 11 bytes, expected are 10 at most"):
            read(place.key("a"))


def test_a_key_that_not_every_store_can_hold_is_refused(place: Place, tmp_path: Path) -> None:
    store, source = place.store, tmp_path / "source"
    source.write_bytes(b"")
    for key in (
        *("", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".tmp/x", "a/.hidden", "a\\b", "a b"),
        *("a\n", "-x", "a/" + "x" * 201, "a\0", "\u00e9"),
    ):
        for use in OF_KEYS.values():
            with pytest.raises(StoreError, match="cannot be a key"):
                use(store, key, source)
