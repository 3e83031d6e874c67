"""Writes that decide something, on stores that can and on stores that cannot.

A store that applies `If-None-Match` and `If-Match` atomically decides by itself. Some ignore them,
refuse them, or check first and write later: there a writer looks first, writes, waits, and reads
back what became of it. That makes two winners rare, not impossible, and is what `weaknesses` says.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from infra.storage.answers import Lost, Refused
from infra.storage.base import Missing, Stored

TRIALS = "_trials"  # the prefix where stores are tried out
SETTLE = 0.15  # seconds between a write and reading it back; see docs/guides/object-storage.md
RACERS = 4
ROUNDS = 5
_STALE = "0" * 32  # the version of nothing
_CANNOT = {400, 405, 501}  # how stores refuse a condition they do not know

Support: TypeAlias = Literal["atomic", "racy", "ignored", "refused", "unquoted"]


class Requests(Protocol):
    """One request each, without another try. Raise Lost and Refused, and Missing where it fits."""

    def put(self, key: str, data: bytes, *, condition: dict[str, str]) -> None:
        """Write an object on a condition: IfNoneMatch or IfMatch."""
        ...

    def get_stored(self, key: str) -> Stored:
        """Read an object."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object."""
        ...

    def matching(self, version: str, *, other: bool = False) -> dict[str, str]:
        """The condition that an object has a version; `other`: in quotes where it was without."""
        ...


ABSENT = {"IfNoneMatch": "*"}


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """What a store makes of conditions."""

    creates: Support  # If-None-Match: *
    swaps: Support  # If-Match: version

    def words(self) -> Iterator[str]:
        """What is not guaranteed, one line each."""
        if self.creates != "atomic":
            yield f"the store {describe(self.creates, 'If-None-Match')}"
        if self.swaps != "atomic":
            yield f"the store {describe(self.swaps, 'If-Match')}"


def describe(support: Support, header: str) -> str:
    """What the store does with a condition."""
    return _TEXTS[support].format(header)


_TEXTS: dict[Support, str] = {
    "atomic": "decides by {0}, also between several writers at once",
    "racy": "lets more than one of several writers win: {0} is not atomic",
    "ignored": "ignores {0}: the last of several writers wins",
    "refused": "refuses {0}",
    "unquoted": "refuses {0} with a version in quotes, as it sent it: set NANOCHAT_S3_ETAG=plain",
}


ATOMIC = Semantics(creates="atomic", swaps="atomic")


def put_if_absent(requests: Requests, key: str, data: bytes, support: Support) -> bool:
    """One try of Store.put_if_absent; may be repeated after Lost and a passing Refused."""
    if support != "atomic" and (found := _find(requests, key)) is not None:
        return found.data == data
    try:
        requests.put(key, data, condition=ABSENT if support in ("atomic", "racy") else {})
    except Refused as error:
        if error.status != 412:
            raise
        return _is_ours(requests, key, data)
    if support == "atomic":
        return True
    time.sleep(SETTLE)
    return _is_ours(requests, key, data)


def put_if_same(requests: Requests, key: str, data: bytes, version: str, support: Support) -> bool:
    """One try of Store.put_if_same; may be repeated after Lost and a passing Refused."""
    if support != "atomic":
        found = _find(requests, key)
        if found is None or found.version != version:
            return found is not None and found.data == data
    matching = requests.matching(version) if support in ("atomic", "racy") else {}
    try:
        requests.put(key, data, condition=matching)
    except Missing:
        return False
    except Refused as error:
        if error.status != 412:
            raise
        found = _find(requests, key)
        return found is not None and found.data == data
    if support == "atomic":
        return True
    time.sleep(SETTLE)
    found = _find(requests, key)
    return found is not None and found.data == data


def find_semantics(
    requests: Requests,
    *,
    under: str,
    persist: Callable[[Callable[[], None]], None],
    rounds: int = ROUNDS,
) -> Semantics:
    """Try what the store makes of conditions, with small objects under the key `under`.

    `persist` does one request, again if need be.
    """
    with ThreadPoolExecutor(RACERS) as pool:
        trial = _Trial(requests, pool, under=f"{under}/{uuid.uuid4().hex}", persist=persist)
        try:
            return Semantics(creates=trial.creates(rounds), swaps=trial.swaps(rounds))
        finally:
            trial.clean()


class _Trial:
    """The objects of one trial."""

    def __init__(
        self,
        requests: Requests,
        pool: Executor,
        *,
        under: str,
        persist: Callable[[Callable[[], None]], None],
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._under = under
        self._persist = persist
        self._keys: list[str] = []

    def creates(self, rounds: int) -> Support:
        """What becomes of If-None-Match: *."""
        key = self._new_key()
        if self._try(key, b"first", ABSENT) == "refused":
            return "refused"
        if self._try(key, b"second", ABSENT) == "written":
            return "ignored"
        for _ in range(rounds):
            if self._race(self._new_key(), ABSENT) > 1:
                return "racy"
        return "atomic"

    def swaps(self, rounds: int) -> Support:
        """What becomes of If-Match: version."""
        key = self._new_key()
        self._persist(lambda: self._requests.put(key, b"first", condition={}))
        if self._try(key, b"stale", self._requests.matching(_STALE)) == "written":
            return "ignored"
        version = self._version(key)
        if self._try(key, b"second", self._requests.matching(version)) != "written":
            other = self._requests.matching(version, other=True)
            return "unquoted" if self._try(key, b"third", other) == "written" else "refused"
        for _ in range(rounds):
            if self._race(key, self._requests.matching(self._version(key))) > 1:
                return "racy"
        return "atomic"

    def clean(self) -> None:
        """Remove the objects; what cannot be removed now is `Store.remove_unfinished`'s."""
        list(self._pool.map(self._delete, self._keys))

    def _delete(self, key: str) -> None:
        try:
            self._requests.delete(key)
        except (Lost, Refused):
            return

    def _new_key(self) -> str:
        self._keys.append(f"{self._under}/{len(self._keys)}")
        return self._keys[-1]

    def _version(self, key: str) -> str:
        found: list[str] = []
        self._persist(lambda: found.append(self._requests.get_stored(key).version))
        return found[-1]

    def _try(
        self, key: str, data: bytes, condition: dict[str, str]
    ) -> Literal["written", "kept", "refused"]:
        """What becomes of a conditional write of bytes that are nowhere else."""
        outcome: list[Literal["written", "kept", "refused"]] = []

        def attempt() -> None:
            try:
                self._requests.put(key, data, condition=condition)
                outcome.append("written")
            except Missing:
                outcome.append("kept")
            except Refused as error:
                if error.status == 412:
                    # Perhaps by an earlier attempt whose answer was lost.
                    outcome.append("written" if _is_ours(self._requests, key, data) else "kept")
                elif error.status in _CANNOT and not error.is_passing:
                    outcome.append("refused")
                else:
                    raise

        self._persist(attempt)
        return outcome[-1]

    def _race(self, key: str, condition: dict[str, str]) -> int:
        """How many of several simultaneous writers are told that they wrote."""
        together = threading.Barrier(RACERS)

        def run(number: int) -> bool:
            together.wait()
            try:
                # Other bytes each time: the same ones would leave the version as it was.
                self._requests.put(key, f"{number} {uuid.uuid4()}".encode(), condition=condition)
            except (Lost, Refused, Missing):
                return False
            return True

        return sum(self._pool.map(run, range(RACERS)))


def _find(requests: Requests, key: str) -> Stored | None:
    try:
        return requests.get_stored(key)
    except Missing:
        return None


def _is_ours(requests: Requests, key: str, data: bytes) -> bool:
    """Whose bytes are there. Lost when nobody's are: then writing is tried again."""
    found = _find(requests, key)
    if found is None:
        raise Lost("the object that was in the way is gone")
    return found.data == data
