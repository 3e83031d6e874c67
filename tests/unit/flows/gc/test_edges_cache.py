"""What a collection remembers of manifests: it spares reads, and changes no result."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.artifacts.publish import commit
from flows.artifacts.revocations import revoke
from flows.gc import edges_cache
from flows.gc.collect import CollectionPlan
from flows.identity.manifest import Manifest
from infra.storage.base import ObjectInfo
from tests.support.flows.rubbish import gc, look, make, make_grown, make_other, place, put_whole
from tests.support.flows.shelf import ACCEPTED, make_manifest, put_run
from tests.support.reliability.memory_store import DAY, MemoryStore


class CountingStore(MemoryStore):
    """Notes which manifests are read, and how often all is listed."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.lists = 0
        self.act: dict[str, Callable[[], object]] = {}  # once, before a list or after a read

    def get(self, key: str, *, size: int | None = None) -> bytes:
        data = super().get(key, size=size)
        if key.endswith("/manifest.json"):
            self.reads.append(key)
            self.act.pop(key, lambda: None)()
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not prefix:
            self.lists += 1
            self.act.pop("list", lambda: None)()
        return super().list(prefix)

    def forget(self) -> None:
        """Count from here on."""
        self.reads, self.lists = [], 0


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "work" / "gc.json"


def fill(store: CountingStore) -> dict[str, Manifest]:
    """A model and what it is made from, an accepted one, one that shares files, and garbage."""
    rows = make(store)
    model = make(store, "sft", inputs={"rows": rows})
    old = make(store, seed=5)
    made = {
        "rows": rows,
        "model": model,
        "old": old,
        "accepted": make(store, seed=6, accepted={**ACCEPTED, "from": old.fingerprint}),
        "grown": make_grown(store, rows),
        "garbage": make(store, seed=7),
    }
    revoke(store, old, why="wrong", who="me", when="now")
    put_run(store, "tiny-1", model, made["accepted"])
    put_run(store, "d12-1", made["grown"], name="d12")
    store.now += 2 * DAY
    return made


def same(plan: CollectionPlan, other: CollectionPlan) -> bool:
    """Whether two collections would do the same."""
    one, two = plan.survey, other.survey
    return (one.garbage, one.deletable, one.marks) == (two.garbage, two.deletable, two.marks)


def test_the_second_collection_reads_no_manifest_and_finds_the_same(
    store: CountingStore, cache: Path
):
    made = fill(store)
    gc(store, cache=cache)
    assert len(store.reads) == len(made)
    store.forget()
    store.now += 2 * DAY
    assert same(plan := look(store, cache=cache), look(store))
    assert plan.survey.deletable
    assert len(store.reads) == len(made)  # by the one without a cache
    assert store.lists == 2


def rebuild(store: MemoryStore, old: Manifest) -> None:
    """Build it again: other files, and another manifest in the earlier one's place."""
    new = make_other(old)
    store.put(new.files[0].key, b"x")
    commit(store, new, attempt="b", check_lease=lambda: None, replaces=old)


def replace_by_another_source(store: MemoryStore, old: Manifest) -> None:
    """Another manifest of the same size, in the same moment, names another artifact's files."""
    other = make_manifest("rows", config={"seed": 7}).files[0].key
    files = (dataclasses.replace(old.files[0], key=other),)
    store.put(f"{place(old)}/manifest.json", dataclasses.replace(old, files=files).to_json())


CHANGES: dict[str, Callable[[MemoryStore, Manifest], object]] = {
    "built again": rebuild,
    "replaced": replace_by_another_source,
    "deleted": lambda store, old: store.delete(f"{place(old)}/manifest.json"),
}


@pytest.mark.parametrize("which", ["rows", "model", "accepted", "grown", "garbage"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_changed_counts_as_it_is_now(
    store: CountingStore, cache: Path, change: str, which: str
):
    made = fill(store)
    gc(store, cache=cache)
    now = store.now
    store.now -= 2 * DAY  # as if it had been written in the same moment as the one before
    CHANGES[change](store, made[which])
    store.now = now
    for _ in range(3):
        store.forget()
        assert same(look(store, cache=cache), look(store))
        store.now += 2 * DAY
        gc(store, cache=cache)


def test_a_manifest_that_changes_is_read_before_another_list(store: CountingStore, cache: Path):
    made = fill(store)
    gc(store, cache=cache)
    rebuild(store, made["rows"])
    store.forget()
    look(store, cache=cache)
    assert store.reads == [f"{place(made['rows'])}/manifest.json"]
    assert store.lists == 2


def test_what_is_deleted_is_no_change_for_the_next_collection(store: CountingStore, cache: Path):
    made = fill(store)
    gc(store, cache=cache)
    store.now += 2 * DAY
    gc(store, cache=cache)
    assert f"{place(made['garbage'])}/manifest.json" not in store.names()
    store.forget()
    look(store, cache=cache)
    assert (store.reads, store.lists) == ([], 1)


@pytest.mark.parametrize("is_right_after", [True, False])
def test_a_manifest_that_changes_between_the_read_and_the_list_is_not_remembered(
    store: CountingStore, cache: Path, is_right_after: bool
):
    made = fill(store)
    moment = f"{place(made['model'])}/manifest.json" if is_right_after else "list"
    store.act[moment] = lambda: rebuild(store, made["model"])
    gc(store, cache=cache)
    store.now += 2 * DAY
    assert same(look(store, cache=cache), look(store))
    for _ in range(3):
        gc(store, cache=cache)
        store.now += 2 * DAY
    assert make_other(made["model"]).files[0].key in store.names()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-40],
    "another attempt": lambda data: data.replace(b"/files/a/", b"/files/b/", 1),
    "another input": lambda data: data.replace(b'["rows/', b'["rowz/', 1),
    "another check": lambda data: b"0" * 64 + data[64:],
    "no text": lambda data: bytes(256),
    "only a check": lambda data: data[:64],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_written_again(
    store: CountingStore, cache: Path, damage: str
):
    made = fill(store)
    gc(store, cache=cache)
    whole = cache.read_bytes()
    cache.write_bytes(DAMAGES[damage](whole))
    assert cache.read_bytes() != whole
    store.forget()
    store.now += 2 * DAY
    plan = look(store, cache=cache)
    assert len(store.reads) == len(made)
    assert same(plan, look(store))
    look(store, cache=cache)
    assert [path.name for path in cache.parent.iterdir()] == ["gc.json"]
    store.forget()
    assert same(look(store, cache=cache), plan)
    assert store.reads == []


def test_a_file_of_another_format_is_read_anew(
    store: CountingStore, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    made = fill(store)
    for number in (7, 8):
        monkeypatch.setattr(edges_cache, "FORMAT", number)
        store.forget()
        look(store, cache=cache)
        assert len(store.reads) == len(made)


def test_other_edges_of_the_same_manifests_have_another_format(
    store: CountingStore, cache: Path
) -> None:
    """Raise FORMAT with the digest: a cache of before would lack the new edges."""
    fill(store)
    look(store, cache=cache)
    rows = json.loads(cache.read_bytes().partition(b"\n")[2])
    edges = json.dumps([[place, *named] for place, _, *named in rows])
    digest = hashlib.sha256(edges.encode()).hexdigest()
    assert (edges_cache.FORMAT, digest[:12]) == (1, "58cbabce324e")


def test_a_store_without_etags_is_read_anew_each_time(
    store: CountingStore, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    made = fill(store)
    monkeypatch.setattr("tests.support.reliability.memory_store._version", lambda data: "")
    for _ in range(2):
        store.forget()
        look(store, cache=cache)
        assert (len(store.reads), store.lists) == (len(made), 1)


def test_a_disk_that_refuses_the_file_stops_nothing(store: CountingStore, cache: Path):
    fill(store)
    cache.parent.write_text("in the way")
    assert same(look(store, cache=cache), look(store))
    gc(store, cache=cache)


def test_the_file_of_another_store_says_nothing_of_this_one(store: CountingStore, cache: Path):
    other = CountingStore()
    made = fill(store)
    other.now = store.now - 2 * DAY
    for manifest in made.values():
        put_whole(other, make_other(manifest))
    put_run(other, "tiny-1", made["model"])
    other.now = store.now
    for _ in range(2):
        gc(store, cache=cache)
        assert same(look(other, cache=cache), look(other))
        gc(other, cache=cache)
        other.now = store.now = store.now + 2 * DAY
    assert make_other(made["model"]).files[0].key in other.names()
    assert made["model"].files[0].key in store.names()
