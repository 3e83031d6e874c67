"""Waiting for a claim to build is visible, ends for several reasons, and blocks no other."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.acquire import BuildClaim, acquire
from flows.leases.held_lease import HeldLease, LeaseTimings, try_acquire
from flows.leases.outage import StoreWait, WaitLog
from infra.launch.torchrun import StageInterrupted
from infra.storage.local import LocalStore
from nanochat_core.errors import StoreError
from tests.support.flows.claims import claim
from tests.support.flows.waiting import wait_until

FINGERPRINT = "ab" * 32
REF = ArtifactRef("sft", FINGERPRINT)
TERMS = LeaseTimings(ttl=60.0, beat=0.02, poll=0.01, max_poll=0.02, report=1000.0)
SECONDS = 100.0  # more than a busy machine needs
ARTIFACT = cast(Manifest, object())  # its contents are not read


class Waiter:
    """A process that wants to build, in a thread."""

    def __init__(self, directory: Path, name: str = "a", **changes: Any) -> None:
        self.logged: list[str] = []
        self.stop = changes.pop("stop", threading.Event())
        self.artifact: Manifest | None = None
        terms: LeaseTimings = changes.pop("terms", TERMS)
        self.result: Any = None
        self.may_end = threading.Event()
        build_claim = BuildClaim(
            ref=REF,
            lease=claim(name),
            lock_path=file_lock.lock_path(directory / f"home-{name}", REF),
            device=None,
            find=lambda: self.artifact,
            wait=StoreWait(
                store=LocalStore(directory / "disk" / "store"),
                name="sft",
                waiting=WaitLog(self.logged.append, every=terms.report),
                stop=self.stop,
                terms=terms,
            ),
        )
        self.claim = replace(build_claim, **changes)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with acquire(self.claim) as self.result:
                self.may_end.wait(SECONDS)
        except (StageInterrupted, StoreError) as error:
            self.result = error

    def wait_for_result(self) -> Any:
        """What came of it."""
        wait_until(lambda: self.result is not None)
        return self.result

    def end(self) -> None:
        """Give everything back."""
        self.stop.set()
        self.may_end.set()
        self._thread.join()


@pytest.fixture
def wait(tmp_path: Path) -> Generator[Callable[..., Waiter]]:
    (tmp_path / "disk").mkdir()
    waiters: list[Waiter] = []

    def wait(name: str = "a", **changes: Any) -> Waiter:
        waiters.append(Waiter(tmp_path, name, **changes))
        return waiters[-1]

    yield wait
    for waiter in waiters:
        waiter.end()


@contextlib.contextmanager
def built_elsewhere(directory: Path, *, beat: float = TERMS.beat) -> Generator[HeldLease]:
    """Another machine holds the lease."""
    store = LocalStore(directory / "disk" / "store")
    lease = try_acquire(store, REF, claim("other"))
    assert isinstance(lease, HeldLease)
    with lease.keep(beat=beat):
        yield lease


def lease_path(directory: Path) -> Path:
    return directory / "disk" / "store" / "sft" / FINGERPRINT / "lease.json"


def set_age(directory: Path, seconds: float) -> None:
    """Have the last heartbeat be that long ago."""
    then = time.time() - seconds
    os.utime(lease_path(directory), (then, then))


def test_a_free_claim_is_granted_at_once_and_silently(wait):
    waiter = wait()
    assert isinstance(waiter.wait_for_result(), HeldLease)
    assert waiter.logged == []
    assert file_lock.is_held(waiter.claim.lock_path)
    waiter.end()
    assert not file_lock.is_held(waiter.claim.lock_path)


def test_waiting_for_another_machine_says_for_whom_and_ends_when_it_is_released(wait, tmp_path):
    with built_elsewhere(tmp_path) as lease:
        lease.note(step=310, total=900)
        wait_until(lambda: b'"step": 310' in lease_path(tmp_path).read_bytes())
        waiter = wait()
        wait_until(lambda: waiter.logged)
        time.sleep(5 * TERMS.max_poll)
        assert waiter.result is None
    assert isinstance(waiter.wait_for_result(), HeldLease)
    (text,) = waiter.logged
    assert re.fullmatch(
        r"waiting: built by run run-other on host host-other, step 310/900, heartbeat \d s ago",
        text,
    )
    assert waiter.result.record.epoch == 2


def test_who_is_waited_for_is_said_again_now_and_then(wait, tmp_path):
    with built_elsewhere(tmp_path) as lease:
        began = time.monotonic()
        waiter = wait(terms=replace(TERMS, report=0.1))
        wait_until(lambda: waiter.logged)
        lease.note(step=2, total=9)
        wait_until(lambda: len(waiter.logged) == 4)
        assert time.monotonic() - began > 0.3
    assert "step 2/9" in waiter.logged[-1]


def test_another_builder_is_said_at_once(wait, tmp_path):
    with built_elsewhere(tmp_path):
        first = wait("a")
        second = wait("b")
        wait_until(lambda: first.logged and second.logged)
    wait_until(lambda: (first.result or second.result) is not None)
    late = second if first.result is not None else first
    wait_until(lambda: len(late.logged) == 2)
    assert "built by run run-other " in late.logged[0]
    assert f"built by run run-{'a' if late is second else 'b'} " in late.logged[1]


def test_a_builder_that_falls_silent_is_reported_and_taken_over(wait, tmp_path):
    terms = replace(TERMS, ttl=2.0)
    with built_elsewhere(tmp_path, beat=1000.0):
        set_age(tmp_path, 3600.0)  # its clock was behind
        began = time.monotonic()
        waiter = wait(terms=terms)
        wait_until(lambda: len(waiter.logged) == 2)
        lease = waiter.wait_for_result()
        assert isinstance(lease, HeldLease)
        assert lease.record.epoch == 2
        assert time.monotonic() - began > terms.ttl
    assert len(waiter.logged) == 2
    assert waiter.logged[1].endswith(" ago; its lease expires after 2 s without one")


def test_an_artifact_that_appears_ends_the_waiting(wait, tmp_path):
    with built_elsewhere(tmp_path) as lease:
        waiter = wait()
        wait_until(lambda: waiter.logged)
        waiter.artifact = ARTIFACT
        assert waiter.wait_for_result() is ARTIFACT
        lease.check()


def test_stopping_the_run_ends_the_waiting(wait, tmp_path):
    slow = replace(TERMS, poll=1000.0, max_poll=1000.0)
    with built_elsewhere(tmp_path):
        waiter = wait(terms=slow)
        wait_until(lambda: waiter.logged)
        waiter.stop.set()
        assert isinstance(waiter.wait_for_result(), StageInterrupted)


def test_a_process_of_this_machine_is_waited_for_and_its_end_is_seen_at_once(wait, tmp_path):
    slow = replace(TERMS, poll=1000.0, max_poll=1000.0)
    path = file_lock.lock_path(tmp_path / "home-a", REF)
    with file_lock.try_hold(path), built_elsewhere(tmp_path):
        waiter = wait(terms=slow)
        wait_until(lambda: waiter.logged)
        assert waiter.logged[0].startswith("waiting: built by run run-other on host ")
    assert isinstance(waiter.wait_for_result(), HeldLease)


def test_the_device_is_free_for_others_while_one_waits_for_another_machine(wait, tmp_path):
    device = threading.Semaphore()
    with built_elsewhere(tmp_path):
        waiter = wait(device=device)
        wait_until(lambda: waiter.logged)
        assert device.acquire(timeout=SECONDS)
        device.release()
        assert waiter.result is None
    waiter.wait_for_result()
    assert not device.acquire(timeout=0.1)
    waiter.end()
    assert device.acquire(timeout=SECONDS)


def test_the_device_is_free_while_one_waits_for_a_process_of_this_machine(wait, tmp_path):
    device = threading.Semaphore()
    is_free: list[bool] = []

    class Pausing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            is_free.append(device.acquire(blocking=False))
            if is_free[-1]:
                device.release()
            return super().wait(timeout)

    with file_lock.try_hold(file_lock.lock_path(tmp_path / "home-a", REF)):
        waiter = wait(device=device, stop=Pausing())
        wait_until(lambda: len(is_free) > 2)
    assert all(is_free)
    assert isinstance(waiter.wait_for_result(), HeldLease)


def test_a_build_that_waits_for_the_device_leaves_the_lease_to_others(wait):
    device = threading.Semaphore(0)
    waiter = wait(device=device)
    other = wait("b")
    assert isinstance(other.wait_for_result(), HeldLease)
    wait_until(lambda: waiter.logged)
    assert "run-b" in waiter.logged[0]
    other.end()
    waiter.artifact = ARTIFACT  # made by the other one
    assert waiter.wait_for_result() is ARTIFACT


def test_a_store_that_stays_away_for_longer_than_a_lease_lives_is_waited_for_but_not_at_the_start(
    wait, tmp_path
):
    terms = replace(TERMS, ttl=0.2)
    with built_elsewhere(tmp_path, beat=1000.0):
        set_age(tmp_path, -1000.0)  # it does not expire
        waiter = wait(terms=terms)
        wait_until(lambda: waiter.logged)
        (tmp_path / "disk").rename(tmp_path / "away")
        wait_until(lambda: any("store not reached for" in text for text in waiter.logged))
        time.sleep(2 * terms.ttl)
        assert waiter.result is None
        assert isinstance(wait("b").wait_for_result(), StoreError)
        (tmp_path / "away").rename(tmp_path / "disk")
    assert isinstance(waiter.wait_for_result(), HeldLease)


def test_a_store_that_refuses_for_longer_than_a_lease_lives_ends_the_waiting(wait, tmp_path):
    with built_elsewhere(tmp_path):
        waiter = wait(device=threading.Semaphore(0), terms=replace(TERMS, ttl=0.2))
        wait_until(lambda: waiter.logged)
        folder = tmp_path / "disk" / "store" / "sft"
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
        assert "is a link" in str(waiter.wait_for_result())
