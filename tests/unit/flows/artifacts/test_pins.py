"""Records of what is used, waiting for collections that may have missed them, and pins."""

import pytest

from flows.artifacts.pins import PINS, Pin, find_pin, pin, reserve, wait_for_sweep
from flows.identity.ref import ArtifactRef
from flows.leases import lease
from nanochat_core.errors import StageError
from tests.support.flows.rubbish import start_collection
from tests.support.reliability.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


class Waiter:
    """Counts what it does; the collection it waits for ends after some looks."""

    def __init__(self, store: MemoryStore, *, looks: int, again: int = 0) -> None:
        self.store = store
        self.looks = looks
        self.again = again  # collections that begin when one has ended
        self.did: list[str] = []
        self.held = start_collection(store) if looks else None

    def record(self) -> None:
        self.did.append("record")
        if self.again and self.held is None:
            self.again -= 1
            self.held = start_collection(self.store)
            self.looks = 1

    def log(self, text: str) -> None:
        assert text.startswith("waiting: garbage is being collected by run gc on host")
        self.did.append("log")

    def pause(self, seconds: float) -> None:
        self.did.append("pause")
        self.store.now += seconds
        self.looks -= 1
        if self.looks == 0:
            self.held.release()
            self.held = None

    def reserve(self) -> list[str]:
        reserve(self.store, self.record, log=self.log, pause=self.pause)
        return self.did


@pytest.mark.parametrize(
    ("looks", "again", "did"),
    [
        (0, 0, ["record"]),
        (3, 0, ["record", "log", "pause", "pause", "pause", "record"]),
        (1, 1, ["record", "log", "pause", "record", "log", "pause", "record"]),
    ],
)
def test_each_collection_is_waited_for_and_what_was_recorded_during_it_is_recorded_again(
    store, looks, again, did
):
    assert Waiter(store, looks=looks, again=again).reserve() == did


def test_a_collection_that_was_killed_is_not_waited_for_longer_than_its_lease_lasts(store):
    began = store.now
    Waiter(store, looks=-1).reserve()
    assert lease.TTL < store.now - began < lease.TTL + 5


def test_waiting_ends_when_the_run_is_stopped(store):
    start_collection(store)

    def stop(seconds: float) -> None:
        raise StageError("stopped")

    with pytest.raises(StageError, match="stopped"):
        wait_for_sweep(store, log=lambda text: None, pause=stop)


def test_a_pin_is_there_while_its_block_runs_whatever_happens_in_it(store):
    waiter = Waiter(store, looks=0)
    places = [ArtifactRef("rows", "a" * 64), ArtifactRef("sft", "b" * 64)]
    seen: list[Pin | None] = []

    def work() -> None:
        with pin(store, places, why="accept", log=waiter.log, pause=waiter.pause):
            seen.extend(find_pin(store, key) for key in store.names(PINS))
            raise ValueError("oh")

    with pytest.raises(ValueError, match="oh"):
        work()
    assert seen == [Pin(artifacts=tuple(places), why="accept")]
    assert store.names(PINS) == set()
    assert find_pin(store, f"{PINS}1.json") is None
