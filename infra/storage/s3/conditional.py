"""Conditional writes by If-None-Match and If-Match, and the probe that tests both.

Only a store that applies both atomically can decide between writers, so artifacts are built only
there (flows/leases/lease.py). Any other store can be a mirror that one process at a time writes to:
there a conditional write reads first, and then writes.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from infra.storage.base import ObjectNotFound, VersionedObject
from infra.storage.s3.errors import NOT_S3, ErrorResponse, NoResponse
from nanochat_core.errors import StoreError

TRIALS = "_trials"  # prefix of the objects that a probe writes
RACERS = 4
ROUNDS = 5
_STALE = "0" * 32  # a version that no object has
_CANNOT = {400, 405, 501}  # how stores refuse a condition they do not know

Support: TypeAlias = Literal["atomic", "racy", "ignored", "refused"]


class Requests(Protocol):
    """Single requests without retries. Raise NoResponse, ErrorResponse and ObjectNotFound."""

    def put(self, key: str, data: bytes, *, condition: dict[str, str]) -> None:
        """Write an object on a condition: IfNoneMatch or IfMatch."""
        ...

    def get_stored(self, key: str) -> VersionedObject:
        """Read an object."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object."""
        ...

    def matching(self, version: str) -> dict[str, str]:
        """Return the condition that an object has a version."""
        ...


ABSENT = {"IfNoneMatch": "*"}


@dataclass(frozen=True, kw_only=True)
class ConditionalWrites:
    """A store's support of conditional writes."""

    creates: Support  # If-None-Match: *
    swaps: Support  # If-Match: version

    def words(self) -> Iterator[str]:
        """Yield what is not guaranteed, one piece of a sentence each."""
        if self.creates != "atomic":
            yield describe(self.creates, "If-None-Match")
        if self.swaps != "atomic":
            yield describe(self.swaps, "If-Match")


def describe(support: Support, header: str) -> str:
    """Return a phrase for what a store does with a condition."""
    return _TEXTS[support].format(header)


_TEXTS: dict[Support, str] = {
    "atomic": "decides by {0}, also between several writers at once",
    "racy": "lets more than one of several writers win: {0} is not atomic",
    "ignored": "ignores {0}: the last of several writers wins",
    "refused": "refuses {0}",
}


ATOMIC = ConditionalWrites(creates="atomic", swaps="atomic")


def put_if_absent(requests: Requests, key: str, data: bytes, *, is_atomic: bool) -> bool:
    """Try Store.put_if_absent once; safe to retry after NoResponse and a temporary refusal."""
    # Read, then write: safe only while one process writes, as to a mirror.
    if not is_atomic and (found := _find(requests, key)) is not None:
        return found.data == data
    try:
        requests.put(key, data, condition=ABSENT if is_atomic else {})
    except ErrorResponse as error:
        if error.status != 412:
            raise
        # An earlier try may have written it although its answer was lost.
        return _is_ours(requests, key, data)
    return True


def put_if_same(
    requests: Requests, key: str, data: bytes, version: str, *, is_atomic: bool
) -> bool:
    """Try Store.put_if_same once; safe to retry after NoResponse and a temporary refusal."""
    if not is_atomic:
        found = _find(requests, key)
        if found is None or found.version != version:
            return found is not None and found.data == data
    try:
        requests.put(key, data, condition=requests.matching(version) if is_atomic else {})
    except ObjectNotFound:
        return False
    except ErrorResponse as error:
        if error.status != 412:
            raise
        # 412 also follows a lost answer to our own write: then the object has our bytes.
        found = _find(requests, key)
        return found is not None and found.data == data
    return True


class Trial:
    """A probe of a store's conditional writes, with small objects under the key `under`.

    `persist` runs one request, with retries.
    """

    def __init__(
        self, requests: Requests, *, under: str, persist: Callable[[Callable[[], None]], None]
    ) -> None:
        self._requests = requests
        self._under = f"{under}/{uuid.uuid4().hex}"
        self._persist = persist
        self._keys: list[str] = []

    def run(self, rounds: int) -> ConditionalWrites:
        """Return the result of `rounds` races of each kind; remove all objects."""
        with ThreadPoolExecutor(RACERS) as pool:
            try:
                return ConditionalWrites(
                    creates=self._creates(rounds, pool), swaps=self._swaps(rounds, pool)
                )
            finally:
                list(pool.map(self._delete, self._keys))

    def _creates(self, rounds: int, pool: ThreadPoolExecutor) -> Support:
        key = self._new_key()
        if self._try(key, b"first", ABSENT) == "refused":
            return "refused"
        if self._try(key, b"second", ABSENT) == "written":
            return "ignored"
        # One request after another cannot show whether check and write are atomic; races can.
        won = (self._race(self._new_key(), ABSENT, pool) for _ in range(rounds))
        return "racy" if any(count > 1 for count in won) else "atomic"

    def _swaps(self, rounds: int, pool: ThreadPoolExecutor) -> Support:
        # A store that ignores If-Match takes any version; one that cannot parse ours takes none.
        key = self._new_key()
        self._persist(lambda: self._requests.put(key, b"first", condition={}))
        if self._try(key, b"stale", self._requests.matching(_STALE)) == "written":
            return "ignored"
        if self._try(key, b"second", self._matching(key)) != "written":
            return "refused"
        won = (self._race(key, self._matching(key), pool) for _ in range(rounds))
        return "racy" if any(count > 1 for count in won) else "atomic"

    def _delete(self, key: str) -> None:
        with contextlib.suppress(StoreError):  # then `Store.abort_stale_uploads` removes it
            self._persist(lambda: self._requests.delete(key))

    def _new_key(self) -> str:
        self._keys.append(f"{self._under}/{len(self._keys)}")
        return self._keys[-1]

    def _matching(self, key: str) -> dict[str, str]:
        found: list[str] = []
        self._persist(lambda: found.append(self._requests.get_stored(key).version))
        return self._requests.matching(found[-1])

    def _try(
        self, key: str, data: bytes, condition: dict[str, str]
    ) -> Literal["written", "kept", "refused"]:
        """Return the outcome of a conditional write. `data` must not be in the store yet."""
        outcome: list[Literal["written", "kept", "refused"]] = []

        def attempt() -> None:
            try:
                self._requests.put(key, data, condition=condition)
                outcome.append("written")
            except ObjectNotFound:
                outcome.append("kept")
            except ErrorResponse as error:
                if error.status == 412:
                    # An earlier try may have written it although its answer was lost.
                    outcome.append("written" if _is_ours(self._requests, key, data) else "kept")
                elif error.status in _CANNOT and error.code != NOT_S3 and not error.is_passing:
                    outcome.append("refused")
                else:
                    raise

        self._persist(attempt)
        return outcome[-1]

    def _race(self, key: str, condition: dict[str, str], pool: ThreadPoolExecutor) -> int:
        """Return how many of RACERS simultaneous writers are answered that they wrote."""
        together = threading.Barrier(RACERS)

        def run(number: int) -> bool:
            together.wait()  # a barrier: all requests leave at the same moment
            try:
                # Other bytes each time: the same ones would leave the version as it was.
                self._requests.put(key, f"{number} {uuid.uuid4()}".encode(), condition=condition)
            except (NoResponse, ErrorResponse, ObjectNotFound):
                return False
            return True

        return sum(pool.map(run, range(RACERS)))


def _find(requests: Requests, key: str) -> VersionedObject | None:
    try:
        return requests.get_stored(key)
    except ObjectNotFound:
        return None


def _is_ours(requests: Requests, key: str, data: bytes) -> bool:
    """Return whether the object has our bytes.

    Raises NoResponse if it was deleted meanwhile: the write is then retried.
    """
    found = _find(requests, key)
    if found is None:
        raise NoResponse("the object that was in the way is gone")
    return found.data == data
