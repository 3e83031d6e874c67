"""Protections taken out, one at a time: the simulation must find every one of these faults."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from greenlet import getcurrent

import flows.artifacts.publish
import flows.leases.acquire
import flows.leases.held_lease
import flows.leases.process
from flows.artifacts.publish import Published, find_manifest
from flows.identity.manifest import Manifest
from flows.leases.held_lease import HeldLease
from flows.leases.lease import Lease, LeaseHolder, Observer
from flows.leases.process import Process
from infra.storage.base import OnBytes, Store, ignore_bytes
from infra.storage.s3.store import S3Store
from tests.support.reliability.sim_actors import AnyStore, Reader
from tests.support.reliability.sim_s3 import SimS3Store
from tests.support.reliability.sim_store import SimStore
from tests.support.reliability.sim_world import Request


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One protection that is missing."""

    store: type[AnyStore] | None = None  # None: any
    patches: tuple[tuple[Any, str, Any], ...] = ()  # object, attribute, what stands there instead


class _PlainPut(SimStore):
    """The manifest is written over whatever is there."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if not key.endswith("/manifest.json"):
            return super().put_if_absent(key, data)
        self.put(key, data)
        return True


class _PlainSwap(SimStore):
    """A record is replaced without asking whether it changed since it was read."""

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        self.put(key, data)
        return True


class _ManifestFirst(SimStore):
    """Files are uploaded after the manifest that names them."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        done = super().put_if_absent(key, data)
        if key.endswith("/manifest.json"):
            for name, path in self._later():
                super().upload(name, path)
        return done

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        self._later().append((key, path))

    def _later(self) -> list[tuple[str, Path]]:
        return self.__dict__.setdefault("_uploads", [])


class _LostAnswerIsALoss(SimStore):
    """A caller that asks twice gets a refusal the second time."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        def create(request: Request) -> bool:
            was_free = request.key not in self.objects.stored
            return self.objects.create(request) and was_free

        return self.ask("create", key, create, data)


def _not_ours(store: object, key: str, data: bytes) -> bool:
    return False


def _adopt_anything(store: Store, ours: Manifest, data: bytes) -> Published:
    winner = find_manifest(store, ours.ref)
    return Published(manifest=winner or ours, adopted=True, divergence=None)


def _by_store_clock(holder: LeaseHolder, ttl: float) -> bool:
    """Another process may take a lease that looks old by the store's wall clock."""
    return holder.record.released or holder.age > ttl or holder.record.is_dead()


_is_dead = Process.is_dead


def _taking_for_ours(*fields: str) -> Callable[[Process], bool]:
    """These fields of the name of any process are taken for those of this one."""

    def is_dead(process: Process) -> bool:
        me = vars(Process.this())
        return _is_dead(replace(process, **{name: me[name] for name in fields}))

    return is_dead


def _unless_shown(process: Process) -> bool:
    """A process of another user is taken for dead because /proc hides it."""
    is_hidden = flows.leases.process.read_stat(process.pid) is None
    me = Process.this()
    return is_hidden and (process.boot, process.namespace) == (me.boot, me.namespace)


class _WallClock(Observer):
    """The observer measures by the wall clock of its machine, which may be set."""

    def __init__(self, clock: Callable[[], float]) -> None:
        process = getcurrent().process
        super().__init__(lambda: clock() + process.skew)


class _FirstSeen(Observer):
    """The observer counts from when it first saw a record, renewed or not."""

    def silence(self, record: Lease, *, asked: float) -> float:
        return super().silence(replace(record, owner="", epoch=1, beat=1), asked=asked)


class _SameOwner(Observer):
    """The observer takes a renewal for none, because the owner is the same."""

    def silence(self, record: Lease, *, asked: float) -> float:
        return super().silence(replace(record, beat=1), asked=asked)


def _do_not_check(held: HeldLease) -> None:
    pass


MUTATIONS: dict[str, Mutation] = {
    "manifest-by-plain-put": Mutation(store=_PlainPut),
    "epoch-ignored": Mutation(patches=((HeldLease, "_is_of", lambda held, record: True),)),
    "manifest-before-files": Mutation(store=_ManifestFirst),
    "expiry-by-store-clock": Mutation(patches=((LeaseHolder, "has_ended", _by_store_clock),)),
    "namespace-ignored": Mutation(patches=((Process, "is_dead", _taking_for_ours("namespace")),)),
    "boot-ignored": Mutation(patches=((Process, "is_dead", _taking_for_ours("boot")),)),
    "host-by-name": Mutation(patches=((Process, "is_dead", _taking_for_ours("machine")),)),
    "hidden-is-dead": Mutation(patches=((Process, "is_dead", _unless_shown),)),
    "expiry-by-wall-clock": Mutation(patches=((flows.leases.acquire, "Observer", _WallClock),)),
    "expiry-since-first-seen": Mutation(patches=((flows.leases.acquire, "Observer", _FirstSeen),)),
    "renewals-not-seen": Mutation(patches=((flows.leases.acquire, "Observer", _SameOwner),)),
    "lost-answer-is-a-loss": Mutation(
        store=_LostAnswerIsALoss, patches=((flows.artifacts.publish, "_adopt", _adopt_anything),)
    ),
    "412-is-a-loss": Mutation(
        store=SimS3Store,
        patches=(
            (S3Store, "_is_ours", _not_ours),
            (flows.artifacts.publish, "_adopt", _adopt_anything),
        ),
    ),
    "no-check_lease": Mutation(patches=((HeldLease, "check", _do_not_check),)),
    "lease-by-plain-put": Mutation(store=_PlainSwap),
    "bytes-not-verified": Mutation(
        patches=((Reader, "is_whole", staticmethod(lambda data, file: True)),)
    ),
}
