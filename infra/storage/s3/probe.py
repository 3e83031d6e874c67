"""Probe of a store: try everything that is needed of it, in the store itself, and clean up."""

import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

from infra.storage.base import ObjectNotFound, Store
from infra.storage.s3.conditional import RACERS, TRIALS, find_faults
from nanochat_core.errors import StoreError

KEYS = 1001  # one more than a page of a listing
ROUNDS = 20  # races of each kind
THREADS = 16
SKEW = 300  # seconds that clocks may differ; S3 refuses requests at 900
_ANOTHER = "use another store"
PART = 16 << 20  # bytes; a larger object is transferred in parts
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
        tests = [self.get, self.clock, self.list, self.parts, self.conditions]
        is_bucket = self._store.url.startswith("s3:")
        return [*tests, self.checksum, self.unfinished] if is_bucket else tests

    def clean(self) -> list[str]:
        """Remove all objects; return those that could not be removed, or the errors."""
        problems: list[str] = []

        def delete(key: str) -> None:
            try:
                self._store.delete(key)
            except StoreError as error:
                problems.append(str(error))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(delete, self._keys))
        return problems

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
        with ThreadPoolExecutor(THREADS) as pool:
            expected = set(pool.map(self._put, [b""] * KEYS))
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
        faults = find_faults(
            self._store,
            put_if_absent=self._store.put_if_absent,
            put_if_same=lambda key, data, version: self._store.put_if_same(
                key, data, version=version
            ),
            rounds=ROUNDS,
        )
        if faults:
            raise StoreError(f"it {' and '.join(faults)}", hint=_ANOTHER)
        return f"of {RACERS} who write at once one wins, {ROUNDS} times for each condition"

    def checksum(self) -> str:
        """Test that a bucket refuses a body that was damaged on its way."""
        bucket: Any = self._store
        if not bucket.checks_bodies(self._key()):
            raise _Weakness("a damaged body is accepted", hint="reach it by https")
        return "a damaged body is refused"

    def unfinished(self) -> str:
        """Test that a bucket lists unfinished uploads."""
        bucket: Any = self._store
        try:
            return f"{len(bucket.list_unfinished())} unfinished uploads are in it"
        except StoreError as error:
            hint = "let the bucket itself drop unfinished uploads, by a lifecycle rule"
            raise _Weakness(str(error), hint=hint) from error

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
