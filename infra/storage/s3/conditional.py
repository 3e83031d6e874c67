"""The trial for stores without atomic conditional writes by If-None-Match and If-Match.

Leases, names and manifests belong to the writer whose condition held, so a store that does not
apply both headers atomically is refused. Reading needs neither, and is not tried.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from infra.storage.base import Store, StoreUnavailable
from nanochat_core.errors import StoreError

TRIALS = "_trials"  # prefix of the objects that a trial writes
RACERS = 4
ROUNDS = 5
_STALE = "0" * 32  # a version that no object has
_UNSUPPORTED = {400, 405, 501}  # how stores refuse a condition they do not know

_Write: TypeAlias = Callable[[bytes], bool]  # of these bytes; returns whether they were written


def find_faults(
    store: Store,
    *,
    put_if_absent: Callable[[str, bytes], bool],
    put_if_same: Callable[[str, bytes, str], bool],
    rounds: int = ROUNDS,
) -> Sequence[str]:
    """Return what a store lacks, in phrases like "ignores If-Match"; none if it lacks nothing.

    Writes small objects, with races between several writers, and removes them.
    """
    root = f"{TRIALS}/{uuid.uuid4().hex}"
    keys = [f"{root}/existing"]

    def create(key: str) -> _Write:
        return lambda data: put_if_absent(key, data)

    def create_new() -> _Write:
        keys.append(f"{root}/{len(keys)}")
        return create(keys[-1])

    def swap(version: str) -> _Write:
        return lambda data: put_if_same(keys[0], data, version)

    def swap_current() -> _Write:
        return swap(store.get_stored(keys[0]).version)

    def delete(key: str) -> None:
        with contextlib.suppress(StoreError):  # then `Store.abort_stale_uploads` removes it
            store.delete(key)

    try:
        store.put(keys[0], b"first")
        faults = (
            _find_fault("If-None-Match", create(keys[0]), create_new, rounds),
            _find_fault("If-Match", swap(_STALE), swap_current, rounds),
        )
    finally:
        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(delete, keys))
    return [fault for fault in faults if fault]


def _find_fault(header: str, wrong: _Write, right: Callable[[], _Write], rounds: int) -> str | None:
    """Return what is wrong with a condition; None if it is atomic.

    The condition of `wrong` does not hold; that of each write from `right` holds once.
    """
    try:
        if wrong(uuid.uuid4().bytes):
            return f"ignores {header}"
        # A store that cannot parse our version lets no write pass.
        if not right()(uuid.uuid4().bytes):
            return f"refuses {header}"
        # One request after another cannot show whether check and write are atomic; races can.
        if any(_race(right()) > 1 for _ in range(rounds)):
            return f"lets several writers with the same {header} win"
    except StoreUnavailable:
        raise
    except StoreError as error:
        answer = getattr(error.__cause__, "response", {})
        if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") not in _UNSUPPORTED:
            raise
        return f"refuses {header}"
    return None


def _race(write: _Write) -> int:
    """Return how many of RACERS simultaneous writers, each with its own bytes, succeed."""
    together = threading.Barrier(RACERS)

    def run(_: int) -> bool:
        together.wait()  # all requests leave at the same moment
        return write(uuid.uuid4().bytes)

    with ThreadPoolExecutor(RACERS) as pool:
        return sum(pool.map(run, range(RACERS)))
