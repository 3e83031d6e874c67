"""Leases and locks of processes that are stopped or killed."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from flows.identity.ref import ArtifactRef
from flows.leases.file_lock import Owner, find_owner, hold
from flows.leases.held_lease import HeldLease, LeaseTimings, hold_lease
from flows.leases.lease import LeaseHolder, Observer, try_acquire
from infra.storage.local import LocalStore
from tests.support.flows.claims import claim
from tests.support.flows.waiting import wait_until

REF = ArtifactRef("sft", "ab" * 32)
QUICK = LeaseTimings(ttl=2.0, beat=0.05)
SECONDS = 100  # more than a busy machine needs


@contextlib.contextmanager
def held_by_us(store: LocalStore) -> Generator[HeldLease]:
    with hold_lease(store, REF, claim("a"), stop=threading.Event(), terms=QUICK) as lease:
        assert isinstance(lease, HeldLease)
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
    before = lease._held.record.beat
    while lease._held.record.beat == before and not lease.ending.is_set():
        time.sleep(0.01)
    print("lost" if lease.ending.is_set() else "kept", flush=True)
"""


@pytest.mark.parametrize("wanted", [False, True])
def test_a_process_that_was_stopped_for_long_continues_unless_another_wanted_the_lease(
    tmp_path: Path, wanted: bool
) -> None:
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


HOLDER = """
import sys, time
from pathlib import Path
from flows.leases.file_lock import hold

with hold(Path(sys.argv[1]), lambda owner: None):
    print("held", flush=True)
    time.sleep(600)
"""


def start_holder(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_a_waiter_learns_who_builds_and_continues_when_that_process_is_killed(tmp_path: Path):
    path = tmp_path / "x.lock"
    holder = start_holder(path)
    owner = find_owner(path)
    assert owner is not None
    assert owner.pid == holder.pid
    assert str(holder.pid) in str(owner)
    waited_for: list[Owner | None] = []
    taken = threading.Event()

    def wait() -> None:
        with hold(path, waited_for.append):
            taken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: bool(waited_for))
    assert not taken.is_set()
    holder.send_signal(signal.SIGKILL)
    assert taken.wait(SECONDS)
    waiter.join()
    holder.communicate()
    assert set(waited_for) == {owner}
