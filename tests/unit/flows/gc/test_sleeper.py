"""A builder that sleeps through a collection wakes up without its lease."""

import pytest

from flows.leases import lease
from tests.support.flows.rubbish import acquire, gc, place
from tests.support.flows.shelf import make_manifest
from tests.support.reliability.memory_store import DAY, MemoryStore


def test_a_process_that_slept_while_its_files_went_has_lost_its_lease():
    store = MemoryStore()
    manifest = make_manifest("rows", config={"seed": 7})
    held = acquire(store, manifest)
    for file in manifest.files:
        store.put(file.key, b"x" * file.size)
    for _ in range(3):  # nobody takes the lease that expired, and the grace passes twice
        store.now += 2 * DAY
        gc(store)
    assert not list(store.list(f"{place(manifest)}/files/"))
    with pytest.raises(lease.LeaseLost):
        lease.check(store, held)
