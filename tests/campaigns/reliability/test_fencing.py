"""SIGSTOP an owner past its lease, let another machine go on, SIGCONT: it must change nothing.

Each round freezes a real process that builds a stage; the new owner takes the lease when it has run
out. In every other round the new owner has published before the frozen one goes on; in the rest it
is still building, so that a process without the lease check would publish first. The figures of the
last run are in docs/reliability.md. NANOCHAT_TRIALS is the number of rounds. In the control the
frozen process does not ask whose the lease is.
"""

import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.publish import find_manifest, publish
from flows.identity.fingerprint import Code, Identity, identify
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import Observer
from infra.storage.base import ObjectNotFound, Store, StoreUnavailable
from tests.support.campaigns import Campaign
from tests.support.flows.builder_process import SLOW, read_until, slow, start_builder
from tests.support.flows.claims import claim
from tests.support.flows.fixtures import Toys
from tests.support.flows.rows import PROVENANCE
from tests.support.flows.waiting import wait_until

pytestmark = pytest.mark.timeout(7200)

TTL, BEAT = 1.0, 0.1


def test_a_frozen_owner_never_changes_what_its_successor_did(
    tmp_path: Path, campaign: Campaign
) -> None:
    report = freeze_owners(
        tmp_path, rounds=campaign.trials(25), seed=campaign.seed, check_lease=True
    )
    campaign.found(f"{report['fenced']} of {report['rounds']} fenced, {report['locked']} in a swap")
    assert report["breaches"] == []
    assert report["fenced"] == report["rounds"]


def test_without_the_fence_it_does(tmp_path: Path) -> None:
    report = freeze_owners(tmp_path, rounds=4, seed=1, check_lease=False)
    assert {breach.partition(":")[0] for breach in report["breaches"]} == {
        f"round {number}" for number in range(4)
    }
    assert report["fenced"] == 0


def freeze_owners(directory: Path, *, rounds: int, seed: int, check_lease: bool) -> dict[str, Any]:
    """Freeze `rounds` owners; returns how many were fenced and what went wrong."""
    chance = random.Random(seed)
    began = time.monotonic()
    breaches: list[str] = []
    fenced = locked = 0
    for number in range(rounds):
        place = directory / str(number)
        while (
            found := freeze_one(
                place, chance, published_first=number % 2 == 0, check_lease=check_lease
            )
        ) is None:
            locked += 1
            shutil.rmtree(place)
        end, wrong = found
        fenced += end["error"] == "LeaseLost"
        breaches += [f"round {number}: {what}" for what in wrong]
        shutil.rmtree(place)
    return {
        "rounds": rounds,
        "fenced": fenced,
        "locked": locked,
        "breaches": breaches,
        "seconds": round(time.monotonic() - began, 1),
    }


def freeze_one(
    place: Path, chance: random.Random, *, published_first: bool, check_lease: bool
) -> tuple[dict[str, Any], list[str]] | None:
    """One round; returns how the frozen process ended, and what it changed.

    None if it was frozen within a swap: it has the lock of the directory's swaps, so no other
    process takes over until it is continued, and then it has lost nothing.
    """
    toys = _make_toys(place)
    context = toys.context("run-new")
    process = start_builder(
        toys, place / "old", toys.placement.store, ttl=TTL, beat=BEAT, check_lease=check_lease
    )
    read_until(process, "step")
    identity = identify(slow(), context.run, {}, code=Code(toys.root))
    time.sleep(chance.uniform(0.0, 3 * BEAT))
    process.send_signal(signal.SIGSTOP)
    try:
        held = _take_over(context.store, identity)
    except StoreUnavailable:
        (place / "go").touch()
        process.send_signal(signal.SIGCONT)
        assert read_until(process, "end")[-1]["error"] is None
        process.communicate()
        return None
    # Its worker was not frozen. If it may end, there is a result to publish when the process goes
    # on; if not, the job is still running.
    job_has_ended = not check_lease or chance.random() < 0.7
    if job_has_ended:
        (place / "go").touch()
        wait_until(lambda: bool(list((place / "old").glob("work/slow/*/result.json"))))
    if published_first:
        _publish(context.store, identity, held, place)
    before = _what_counts(context.store, identity)
    process.send_signal(signal.SIGCONT)
    end = read_until(process, "end")[-1]
    process.communicate()
    wrong = [
        f"{name} was changed"
        for name, data in _what_counts(context.store, identity).items()
        if data != before[name]
    ]
    if check_lease:
        held.check()
        if not published_first:
            _publish(context.store, identity, held, place)
        manifest = find_manifest(context.store, identity.ref)
        if manifest is None or manifest.provenance.owner != held.record.owner:
            wrong.append("the artifact is not the new owner's")
    return end, wrong


def _make_toys(place: Path) -> Toys:
    (place / "root" / "tasks").mkdir(parents=True)
    (place / "root" / "tasks" / "__init__.py").touch()
    for name in ("home", "old"):
        (place / name).mkdir()
    toys = Toys(root=place / "root", home=place / "home")
    toys.stage("slow", source=SLOW)
    return toys


def _take_over(store: Store, identity: Identity) -> HeldLease:
    """The lease, as soon as it can be had."""
    me, observer = claim("new"), Observer(time.monotonic)
    taken: list[HeldLease] = []

    def ask() -> bool:
        found = try_acquire(store, identity.ref, me, ttl=TTL, observer=observer)
        taken.extend([found] if isinstance(found, HeldLease) else [])
        return bool(taken)

    wait_until(ask)
    return taken[0]


def _publish(store: Store, identity: Identity, held: HeldLease, place: Path) -> None:
    """What the new owner makes."""
    output = place / "output"
    output.mkdir()
    (output / "value.txt").write_text("new")
    record = held.record
    provenance = replace(PROVENANCE, run="run-new", owner=record.owner, epoch=record.epoch)
    publish(
        store,
        identity,
        output,
        logs=[],
        inputs={},
        provenance=provenance,
        check_lease=held.check,
    )


def _what_counts(store: Store, identity: Identity) -> dict[str, bytes | None]:
    """The objects that only the new owner may write."""
    found: dict[str, bytes | None] = {}
    for name in ("lease.json", "manifest.json"):
        try:
            found[name] = store.get(f"{identity.stage}/{identity.fingerprint}/{name}")
        except ObjectNotFound:
            found[name] = None
    return found
