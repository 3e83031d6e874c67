"""Probe of a store: try what is needed of it, in the store itself, and clean up.

Leases, names and manifests belong to the writer whose condition held, so a store that does not
apply If-None-Match and If-Match atomically is refused (`find_faults`). Reading needs neither.
`nanochat doctor` tries everything (`probe`).
"""

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
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
ROUNDS = 20  # races of each kind
SKEW = 300  # seconds that clocks may differ; S3 refuses requests at 900
_ANOTHER = "use another store"
PART = 16 << 20  # bytes; a larger object is transferred in parts
_STALE = "0" * 32  # a version that no object has
_At: TypeAlias = tuple[str, str | None]  # a key and the version that it has to have; None: none
_UNSUPPORTED = {400, 405, 501}  # how stores refuse a condition they do not know
State: TypeAlias = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One tested ability of a store.

    `warn` means that a run works, but worse than it could; `fail` means that it does not work.
    """

    name: str
    state: State
    found: str
    remedy: str | None = None


class _Weakness(StoreError):
    """Something that makes a run work worse than it could."""


def probe(store: Store) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; stop if the store is unusable."""
    trial = _Trial(store)
    try:
        first = _find(trial.put)
        yield first
        if first.state == "fail":
            return
        # From here on a failed test is a finding: the others still run.
        yield from map(_find, trial.tests())
    finally:
        left = trial.clean()
    yield Finding(
        name="delete",
        state="fail" if left else "ok",
        found=f"{left[0]}" if left else "all that was put is gone again",
        remedy="allow deleting: the store grows for ever without" if left else None,
    )


def _find(test: Callable[[], str]) -> Finding:
    """Run a test, which returns what it found, and turn its errors into findings."""
    name = test.__name__
    try:
        return Finding(name=name, state="ok", found=test())
    except StoreError as error:
        state = "warn" if isinstance(error, _Weakness) else "fail"
        remedy = error.hint or ""
        # The hint recommends the command that is running.
        if "nanochat doctor" in remedy:
            remedy = "try NANOCHAT_S3_ADDRESSING, or use another store"
        return Finding(name=name, state=state, found=str(error), remedy=remedy)
    except ObjectNotFound as error:
        found = f"{error} that was just put"
        return Finding(name=name, state="fail", found=found, remedy=_ANOTHER)


class _Trial:
    """The objects of one probe, and the tests."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = f"{TRIALS}/{uuid.uuid4().hex}"
        self._numbers = itertools.count()  # safe from any thread
        self._keys: list[str] = []

    def tests(self) -> Sequence[Callable[[], str]]:
        """Return all tests after the first put."""
        return [self.get, self.clock, self.list, self.parts, self.conditions]

    def clean(self) -> list[str]:
        """Remove all objects; return those that could not be removed, or the errors."""

        def delete(key: str) -> str:
            try:
                self._store.delete(key)
            except StoreError as error:
                return str(error)
            return ""

        return [problem for problem in in_parallel(delete, self._keys) if problem]

    def put(self) -> str:
        """Test that an object can be written."""
        key = self._key()
        # The first request also connects and loads credentials: only the second is timed.
        self._store.put(key, b"connect")
        started = time.perf_counter()
        self._store.put(key, b"put")
        return f"{self._store.url} takes an object in {_milliseconds(started)}"

    def get(self) -> str:
        """Test that an object comes back as it was."""
        data = os.urandom(100_000)
        key = self._put(data)
        started = time.perf_counter()
        if self._store.get(key) != data:
            raise StoreError("other bytes come back than were put", hint=_ANOTHER)
        return f"100 kB come back in {_milliseconds(started)}"

    def clock(self) -> str:
        """Test that objects have an age, and that the clocks agree."""
        key = self._put(b"clock")
        age = self._store.get_stored(key).age
        skew = time.time() - self._store.head(key).modified
        # A lease's age is the difference of two times of the store's own clock, so this must be
        # right; a wrong clock of this machine is only a warning.
        if age > SKEW:
            raise StoreError(f"a new object is {age:.0f} s old", hint="set the store's clocks")
        if abs(skew) > SKEW:
            side = "ahead of" if skew > 0 else "behind"
            raise _Weakness(
                f"this machine's clock is {abs(skew):.0f} s {side} the store's",
                hint="set this machine's clock, for example with NTP; S3 refuses at 900 s",
            )
        return "the store's clock and ours agree"

    def list(self) -> str:
        """Test that more keys than fit in one page are all listed."""
        expected = set(in_parallel(self._put, [b""] * KEYS))
        missing = expected - {entry.key for entry in self._store.list(self._root)}
        if missing:
            raise StoreError(
                f"{len(missing)} of {KEYS} keys are not listed",
                hint=f"{_ANOTHER}: what is not listed looks like garbage",
            )
        return f"all of {KEYS} keys are listed, in order"

    def parts(self) -> str:
        """Test that a large object goes there and back."""
        # One byte more than a part: the smallest object that is uploaded in parts.
        key, data = self._key(), os.urandom(PART + 1)
        with TemporaryDirectory() as name:
            source, target = Path(name, "source"), Path(name, "target")
            source.write_bytes(data)
            started = time.perf_counter()
            self._store.upload(key, source)
            uploaded = time.perf_counter()
            self._store.fetch(key, target, size=len(data))
            fetched = time.perf_counter()
            if target.read_bytes() != data:
                raise StoreError("a large object came back damaged", hint=_ANOTHER)
        up, down = (len(data) / 1e6 / s for s in (uploaded - started, fetched - uploaded))
        return f"a large object: {up:.0f} MB/s up, {down:.0f} MB/s down"

    def conditions(self) -> str:
        """Test that one of several simultaneous conditional writes wins."""
        faults = find_faults(self._store, self._write_if, rounds=ROUNDS)
        if faults:
            raise StoreError(f"it {' and '.join(faults)}", hint=_ANOTHER)
        return f"of {RACERS} who write at once one wins, {ROUNDS} times for each condition"

    def _write_if(self, key: str, data: bytes, version: str | None = None) -> bool:
        if version is None:
            return self._store.put_if_absent(key, data)
        return self._store.put_if_same(key, data, version=version)

    def _key(self) -> str:
        """Return a new key of this probe, to be removed at its end."""
        key = f"{self._root}/{next(self._numbers):04}"
        self._keys.append(key)
        return key

    def _put(self, data: bytes) -> str:
        """Write an object under a new key and return the key."""
        key = self._key()
        self._store.put(key, data)
        return key


def _milliseconds(started: float) -> str:
    return f"{1000 * (time.perf_counter() - started):.0f} ms"


def find_faults(store: Store, write_if: Callable[..., bool], *, rounds: int = 5) -> Sequence[str]:
    """Return what a store lacks, in phrases like "ignores If-Match"; none if it lacks nothing.

    `write_if` writes bytes at a key that has this version, or does not exist. Writes small objects,
    with races between several writers, and removes them.
    """
    root = f"{TRIALS}/{uuid.uuid4().hex}"
    keys = [f"{root}/existing"]

    def new() -> _At:
        keys.append(f"{root}/{len(keys)}")
        return keys[-1], None

    def current() -> _At:
        return keys[0], store.get_stored(keys[0]).version

    def write(at: _At) -> bool:
        return write_if(at[0], uuid.uuid4().bytes, at[1])

    try:
        store.put(keys[0], b"first")
        faults = (
            _find_fault("If-None-Match", write, (keys[0], None), new, rounds),
            _find_fault("If-Match", write, (keys[0], _STALE), current, rounds),
        )
    finally:
        for key in keys:
            with contextlib.suppress(StoreError):  # then `Store.abort_stale_uploads` removes it
                store.delete(key)
    return [fault for fault in faults if fault]


def _find_fault(
    header: str, write: Callable[[_At], bool], wrong: _At, right: Callable[[], _At], rounds: int
) -> str:
    """Return what is wrong with a condition; "" if it is atomic.

    A write at `wrong` must fail; of those at one `right`, one succeeds.
    """
    try:
        if write(wrong):
            return f"ignores {header}"
        # A store that cannot parse our version lets no write pass.
        if not write(right()):
            return f"refuses {header}"
        # One request after another cannot show whether check and write are atomic; races can.
        is_racy = any(_race(write, right()) > 1 for _ in range(rounds))
        return f"lets several writers with the same {header} win" if is_racy else ""
    except StoreUnavailable:
        raise
    except StoreError as error:
        answer = getattr(error.__cause__, "response", {})
        if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") not in _UNSUPPORTED:
            raise
        return f"refuses {header}"


def _race(write: Callable[[_At], bool], at: _At) -> int:
    """Return how many of RACERS simultaneous writers, each with its own bytes, succeed."""
    together = threading.Barrier(RACERS)

    def run(_: int) -> bool:
        together.wait()  # all requests leave at the same moment
        return write(at)

    return sum(in_parallel(run, range(RACERS), threads=RACERS))
