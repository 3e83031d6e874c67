"""Leases of processes that are stopped."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import HeldLease, LeaseTimings, try_acquire
from flows.leases.lease import LeaseHolder, Observer
from infra.storage.local import LocalStore
from tests.support.flows.claims import claim

REF = ArtifactRef("sft", "ab" * 32)
QUICK = LeaseTimings(ttl=2.0, beat=0.05)
SECONDS = 100  # more than a busy machine needs


@contextlib.contextmanager
def held_by_us(store: LocalStore) -> Generator[HeldLease]:
    lease = try_acquire(store, REF, claim("a"))
    assert isinstance(lease, HeldLease)
    with lease.keep(beat=QUICK.beat):
        yield lease


FROZEN = """
import sys
import time
from pathlib import Path
from infra.storage.local import LocalStore
from tests.integration.flows.leases.test_processes import held_by_us

with held_by_us(LocalStore(Path(sys.argv[1]))) as lease:
    print("held", flush=True)
    sys.stdin.readline()
    before = lease.record.beat
    while lease.record.beat == before and not lease.lost:
        time.sleep(0.01)
    print("lost" if lease.lost else "kept", flush=True)
"""


@pytest.mark.parametrize("wanted", [False, True])
def test_a_process_that_was_stopped_for_long_continues_unless_another_wanted_the_lease(
    tmp_path, wanted
):
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    observer, store = Observer(time.monotonic), LocalStore(tmp_path)
    if wanted:
        first = try_acquire(store, REF, claim("b"), ttl=QUICK.ttl, observer=observer)
        assert isinstance(first, LeaseHolder)
    time.sleep(QUICK.ttl + 0.2)
    if wanted:
        taken = try_acquire(store, REF, claim("b"), ttl=QUICK.ttl, observer=observer)
        assert not isinstance(taken, LeaseHolder)
    process.send_signal(signal.SIGCONT)
    said, _ = process.communicate("\n", timeout=SECONDS)
    assert said == ("lost\n" if wanted else "kept\n")
