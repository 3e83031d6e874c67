"""Conditional writes by If-None-Match and If-Match, and the probe for stores without them.

Leases, names and manifests belong to the writer whose condition held, so a store that does not
apply both headers atomically is refused. Reading needs neither, and is not probed.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from infra.storage.base import ObjectNotFound, Retry, VersionedObject
from infra.storage.s3.errors import NOT_S3, ErrorResponse, NoResponse
from nanochat_core.errors import StoreError

if TYPE_CHECKING:
    from infra.storage.s3.bucket import Bucket  # loads botocore

TRIALS = "_trials"  # prefix of the objects that a probe writes
RACERS = 4
ROUNDS = 5
_STALE = "0" * 32  # a version that no object has
_CANNOT = {400, 405, 501}  # how stores refuse a condition they do not know

_Write: TypeAlias = Callable[[bytes], bool]  # of these bytes; returns whether they were written


def put_if_absent(bucket: "Bucket", key: str, data: bytes) -> bool:
    """Try Store.put_if_absent once; safe to retry after NoResponse and a temporary refusal."""
    try:
        bucket.put(key, data, condition={"IfNoneMatch": "*"})
    except ErrorResponse as error:
        if error.status != 412:
            raise
        # An earlier try may have written it although its answer was lost.
        return _is_ours(bucket, key, data)
    return True


def put_if_same(bucket: "Bucket", key: str, data: bytes, version: str) -> bool:
    """Try Store.put_if_same once; safe to retry after NoResponse and a temporary refusal."""
    try:
        bucket.put(key, data, condition={"IfMatch": f'"{version}"'})
    except ObjectNotFound:
        return False
    except ErrorResponse as error:
        if error.status != 412:
            raise
        # 412 also follows a lost answer to our own write: then the object has our bytes.
        found = _find(bucket, key)
        return found is not None and found.data == data
    return True


def find_faults(bucket: "Bucket", *, retry: Retry) -> Sequence[str]:
    """Return what a store lacks, in phrases like "ignores If-Match"; none if it lacks nothing.

    Writes small objects, with races between several writers, and removes them.
    """
    root = f"{TRIALS}/{uuid.uuid4().hex}"
    keys = [f"{root}/existing"]

    def create(key: str) -> _Write:
        return lambda data: retry(lambda: put_if_absent(bucket, key, data))

    def create_new() -> _Write:
        keys.append(f"{root}/{len(keys)}")
        return create(keys[-1])

    def swap(version: str) -> _Write:
        return lambda data: retry(lambda: put_if_same(bucket, keys[0], data, version))

    def swap_current() -> _Write:
        return swap(retry(lambda: bucket.get_stored(keys[0])).version)

    def delete(key: str) -> None:
        with contextlib.suppress(StoreError):  # then `Store.abort_stale_uploads` removes it
            retry(lambda: bucket.delete(key))

    try:
        retry(lambda: bucket.put(keys[0], b"first"))
        faults = (
            _find_fault("If-None-Match", wrong=create(keys[0]), right=create_new),
            _find_fault("If-Match", wrong=swap(_STALE), right=swap_current),
        )
    finally:
        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(delete, keys))
    return [fault for fault in faults if fault]


def race(write: Callable[[bytes], bool]) -> int:
    """Return how many of RACERS simultaneous writers, each with its own bytes, succeed."""
    together = threading.Barrier(RACERS)

    def run(_: int) -> bool:
        together.wait()  # all requests leave at the same moment
        return write(uuid.uuid4().bytes)

    with ThreadPoolExecutor(RACERS) as pool:
        return sum(pool.map(run, range(RACERS)))


def _find_fault(header: str, *, wrong: _Write, right: Callable[[], _Write]) -> str | None:
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
        if any(race(right()) > 1 for _ in range(ROUNDS)):
            return f"lets several writers with the same {header} win"
    except StoreError as error:
        refusal = error.__cause__
        if (
            isinstance(refusal, ErrorResponse)
            and refusal.status in _CANNOT
            and refusal.code != NOT_S3
            and not refusal.is_passing
        ):
            return f"refuses {header}"
        raise
    return None


def _is_ours(bucket: "Bucket", key: str, data: bytes) -> bool:
    """Return whether the object has our bytes.

    Raises NoResponse if it was deleted meanwhile: the write is then retried.
    """
    found = _find(bucket, key)
    if found is None:
        raise NoResponse("the object that was in the way is gone")
    return found.data == data


def _find(bucket: "Bucket", key: str) -> VersionedObject | None:
    try:
        return bucket.get_stored(key)
    except ObjectNotFound:
        return None
