"""Probe of a store: try what is needed of it, in the store itself, and clean up.

Leases, names and manifests belong to the writer whose condition held, so a store that does not
apply If-None-Match and If-Match atomically is refused (`find_faults`). Reading needs neither.
`nanochat doctor` tries everything (`probe`).
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

from infra.parallel import in_parallel
from infra.storage.base import ObjectNotFound, Store, StoreUnavailable
from nanochat_core.errors import StoreError

KEYS = 1001  # one more than a page of a listing
TRIALS = "_trials"  # prefix of the objects that a probe writes
RACERS = 4
ROUNDS = 5  # races for each condition
PART = 16 << 20  # bytes; a larger object is transferred in parts
_ANOTHER = "use another store"
_UNSUPPORTED = {400, 405, 501}  # how stores refuse a condition they do not know
State: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One tested ability of a store, or of a machine.

    `warn` means that a run works, but worse than it could; `fail` means that it does not work.
    """

    name: str
    state: State
    found: str
    remedy: str | None = None


def probe(store: Store) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; stop if the store is unusable."""
    root = f"{TRIALS}/{uuid.uuid4().hex}"
    keys = [f"{root}/{number:04}" for number in range(KEYS)]
    yield (first := _find(_put, store, keys))
    if first.state == "fail":
        return
    try:
        # A failed test is a finding: the others still run.
        for test in (_get, _parts, _conditions, _list):
            yield _find(test, store, keys)
    finally:
        last = _find(_delete, store, keys)
    yield last


def _find(test: Callable[[Store, Sequence[str]], str], store: Store, keys: list[str]) -> Finding:
    """Run a test, which returns what it found, and turn its errors into findings."""
    name, began = test.__name__[1:], time.perf_counter()
    try:
        found = f"{test(store, keys)} ({1000 * (time.perf_counter() - began):.0f} ms)"
        return Finding(name=name, state="ok", found=found)
    except StoreError as error:
        return Finding(name=name, state="fail", found=str(error), remedy=error.hint)
    except ObjectNotFound as error:
        found = f"{error} that was just put"
        return Finding(name=name, state="fail", found=found, remedy=_ANOTHER)


def _put(store: Store, keys: Sequence[str]) -> str:
    store.put(keys[0], b"put")
    return f"{store.url} takes an object"


def _get(store: Store, keys: Sequence[str]) -> str:
    data = os.urandom(100_000)
    store.put(keys[0], data)
    if store.get(keys[0]) != data:
        raise StoreError("other bytes come back than were put", hint=_ANOTHER)
    return "100 kB come back"


def _parts(store: Store, keys: Sequence[str]) -> str:
    # One byte more than a part: the smallest object that is uploaded in parts.
    data = os.urandom(PART + 1)
    with TemporaryDirectory() as name:
        source, target = Path(name, "source"), Path(name, "target")
        source.write_bytes(data)
        store.upload(keys[1], source)
        store.fetch(keys[1], target, size=len(data))
        if target.read_bytes() != data:
            raise StoreError("a large object came back damaged", hint=_ANOTHER)
    return "a large object goes there and comes back"


def _conditions(store: Store, keys: Sequence[str]) -> str:
    store.check_conditions()
    # A directory shows only by the writes themselves whether it has hard links and locks.
    store.put_if_absent(keys[2], b"first")
    store.put_if_same(keys[2], b"second", version=store.get_stored(keys[2]).version)
    return "of several conditional writes one wins"


def _list(store: Store, keys: Sequence[str]) -> str:
    for _ in in_parallel(lambda key: store.put(key, b""), keys):
        pass
    missing = set(keys) - {entry.key for entry in store.list(keys[0].rpartition("/")[0])}
    if missing:
        raise StoreError(
            f"{len(missing)} of {len(keys)} keys are not listed",
            hint=f"{_ANOTHER}: what is not listed looks like garbage",
        )
    return f"all of {len(keys)} keys are listed, in order"


def _delete(store: Store, keys: Sequence[str]) -> str:
    for _ in in_parallel(store.delete, keys):
        pass
    return "all that was put is gone again"


def find_faults(store: Store, write_if: Callable[..., bool]) -> Sequence[str]:
    """Return what a store lacks, in phrases like "refuses If-Match"; none if it lacks nothing.

    `write_if` writes bytes at a key that has this version, or does not exist. Writes small objects
    and removes them.
    """
    root = f"{TRIALS}/{uuid.uuid4().hex}"
    existing, *new = [f"{root}/{number}" for number in range(ROUNDS + 1)]
    store.put(existing, b"first")
    try:
        same = ((existing, store.get_stored(existing).version) for _ in range(ROUNDS))
        faults = (
            _find_fault("If-None-Match", write_if, ((key, None) for key in new)),
            _find_fault("If-Match", write_if, same),
        )
    finally:
        for key in (existing, *new):
            with contextlib.suppress(StoreError):  # then `Store.abort_stale_uploads` removes it
                store.delete(key)
    return [fault for fault in faults if fault]


def _find_fault(
    header: str, write_if: Callable[..., bool], races: Iterable[tuple[str, str | None]]
) -> str:
    """Return what is wrong with a condition; "" if one writer wins each race.

    A race is a key and the version that it has to have; None: none. One request after another
    cannot show whether check and write are atomic.
    """
    try:
        for key, version in races:
            won = _race(write_if, key, version)
            if won > 1:
                return f"does not apply {header} atomically"
            if not won:  # for example because it cannot parse our version
                return f"refuses {header}"
    except StoreError as error:
        answer = getattr(error.__cause__, "response", {})
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if isinstance(error, StoreUnavailable) or status not in _UNSUPPORTED:
            raise
        return f"refuses {header}"
    return ""


def _race(write_if: Callable[..., bool], key: str, version: str | None) -> int:
    """Return how many of RACERS simultaneous writers, each with its own bytes, succeed."""
    together = threading.Barrier(RACERS)

    def write(_: int) -> bool:
        together.wait()  # all requests leave at the same moment
        return write_if(key, uuid.uuid4().bytes, version)

    return sum(in_parallel(write, range(RACERS), threads=RACERS))
