"""Probe of a store: try everything that is needed of it, in the store itself, and clean up.

If something does not work, the settings that differ between servers are tried too, and the remedy
names the one that helps.
"""

import contextlib
import functools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal, TypeAlias

from infra.storage.base import ObjectNotFound, Store
from infra.storage.parts import PART
from infra.storage.s3.checksums import CHECKSUMS
from infra.storage.s3.conditional import TRIALS, ConditionalWrites, Support, describe
from infra.storage.s3.errors import ErrorResponse, NoResponse, RetryPolicy
from nanochat_core.errors import StoreError

if TYPE_CHECKING:
    from infra.storage.s3.store import S3Store

KEYS = 1001  # one more than a page of a listing
ROUNDS = 20  # races of each kind
RACERS = 4
THREADS = 16
SKEW = 300  # seconds that clocks may differ; S3 refuses requests at 900
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


def probe(store: Store) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; stop if the store is unusable."""
    trial = _Trial(store)
    try:
        first = trial.put()
        yield first
        if first.state == "fail":
            return
        # From here on a failed test is a finding: the others still run.
        for attempt in trial.attempts():
            yield attempt()
    finally:
        left = trial.clean()
    yield Finding(
        name="delete",
        state="fail" if left else "ok",
        found=f"{left[0]}" if left else "all that was put is gone again",
        remedy="allow deleting: the store grows for ever without" if left else None,
    )


class _Trial:
    """The objects of one probe, and the tests of any store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._root = f"{TRIALS}/{uuid.uuid4().hex}"
        self._keys: list[str] = []

    def attempts(self) -> Sequence[Callable[[], Finding]]:
        """Return all tests after the first put."""
        local = [self.get, self.clock, self.range, self.list, self.parts, self.copy]
        if not self._store.url.startswith("s3:"):
            return [
                *map(self._guarded, local),
                self._guarded(self.create),
                self._guarded(self.swap),
            ]
        from infra.storage.s3.store import S3Store  # loads botocore

        assert isinstance(self._store, S3Store)
        bucket = _BucketTrial(self._store, key=self.key)
        of_bucket = [bucket.create, bucket.swap, bucket.checksum, bucket.unfinished]
        return list(map(self._guarded, [*local, *of_bucket]))

    def key(self) -> str:
        """Return a new key of this probe, to be removed at its end."""
        self._keys.append(f"{self._root}/{len(self._keys):04}")
        return self._keys[-1]

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
        with contextlib.suppress(StoreError):  # a finding of its own
            left = [entry.key for entry in self._store.list(f"{self._root}/")]
            # A request that timed out may have been carried out after its key was deleted.
            for key in left:
                delete(key)
            problems += [entry.key for entry in self._store.list(f"{self._root}/")] if left else []
        return problems

    def put(self) -> Finding:
        """Test that an object can be written."""
        key = self.key()
        try:
            # The first request also connects and loads credentials: only the second is timed.
            self._store.put(key, b"connect")
            started = time.perf_counter()
            self._store.put(key, b"put")
        except StoreError as error:
            remedy = find_setting(self._store.url) or error.hint
            return Finding(name="put", state="fail", found=str(error), remedy=remedy)
        milliseconds = 1000 * (time.perf_counter() - started)
        found = f"{self._store.url} takes an object in {milliseconds:.0f} ms"
        return Finding(name="put", state="ok", found=found)

    def get(self) -> Finding:
        """Test that an object comes back as it was."""
        key, data = self.key(), os.urandom(100_000)
        self._store.put(key, data)
        started = time.perf_counter()
        same = self._store.get(key) == data
        milliseconds = 1000 * (time.perf_counter() - started)
        if not same:
            return _fail("get", "other bytes come back than were put", "use another store")
        return Finding(name="get", state="ok", found=f"100 kB come back in {milliseconds:.0f} ms")

    def clock(self) -> Finding:
        """Test that objects have an age, and that the clocks agree."""
        key = self.key()
        self._store.put(key, b"clock")
        age = self._store.get_stored(key).age
        skew = time.time() - self._store.head(key).modified
        # A lease's age is the difference of two times of the store's own clock, so this must be
        # right; a wrong clock of this machine is only a warning.
        if age > SKEW:
            return _fail("clock", f"a new object is {age:.0f} s old", "set the store's clocks")
        if abs(skew) > SKEW:
            side = "ahead of" if skew > 0 else "behind"
            return Finding(
                name="clock",
                state="warn",
                found=f"this machine's clock is {abs(skew):.0f} s {side} the store's",
                remedy="set this machine's clock, for example with NTP; S3 refuses at 900 s",
            )
        return Finding(name="clock", state="ok", found="the store's clock and ours agree")

    def range(self) -> Finding:
        """Test that ranges of an object are right, also at and past its end."""
        key = self.key()
        self._store.put(key, b"0123456789")
        pieces = [self._store.get_range(key, start=start, length=4) for start in (0, 4, 8, 20)]
        if pieces != [b"0123", b"4567", b"89", b""]:
            return _fail("range", f"pieces of an object are wrong: {pieces}", "use another store")
        return Finding(name="range", state="ok", found="pieces of an object are right")

    def list(self) -> Finding:
        """Test that more keys than fit in one page are all listed."""
        expected = {self.key() for _ in range(KEYS)}

        def put(key: str) -> None:
            self._store.put(key, b"")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(put, expected))
        missing = expected - {entry.key for entry in self._store.list(self._root)}
        if missing:
            return _fail(
                "list",
                f"{len(missing)} of {KEYS} keys are not listed",
                "use another store: what is not listed looks like garbage",
            )
        return Finding(name="list", state="ok", found=f"all of {KEYS} keys are listed, in order")

    def parts(self) -> Finding:
        """Test that a large object goes there and back."""
        # One byte more than a part: the smallest object that is uploaded in parts.
        key, data = self.key(), os.urandom(PART + 1)
        with TemporaryDirectory() as name:
            source, target = Path(name, "source"), Path(name, "target")
            source.write_bytes(data)
            started = time.perf_counter()
            self._store.upload(key, source)
            uploaded = time.perf_counter()
            self._store.fetch(key, target, size=len(data))
            fetched = time.perf_counter()
            if target.read_bytes() != data:
                return _fail("parts", "a large object came back damaged", "use another store")
        up, down = (len(data) / 1e6 / s for s in (uploaded - started, fetched - uploaded))
        return Finding(
            name="parts",
            state="ok",
            found=f"a large object: {up:.0f} MB/s up, {down:.0f} MB/s down",
        )

    def copy(self) -> Finding:
        """Test that an object can be copied inside the store."""
        source, target = self.key(), self.key()
        self._store.put(source, b"copy")
        self._store.copy(source, target)
        if self._store.get(target) != b"copy":
            return _fail("copy", "a copy has other bytes", "use another store")
        return Finding(name="copy", state="ok", found="an object is copied inside the store")

    def create(self) -> Finding:
        """Test that one of several simultaneous put_if_absent wins."""
        key = self.key()
        won = [self._store.put_if_absent(key, data) for data in (b"first", b"second")]
        if won != [True, False]:
            return _fail("create", "an object is written over that was not to be", "use another")
        winners = [self._race(self.key(), self._store.put_if_absent) for _ in range(ROUNDS)]
        return _decided("create", winners)

    def swap(self) -> Finding:
        """Test that one of several simultaneous put_if_same wins."""
        key = self.key()
        winners: list[int] = []
        for _ in range(ROUNDS):
            self._store.put(key, uuid.uuid4().bytes)
            version = self._store.get_stored(key).version

            def swap(key: str, data: bytes, version: str = version) -> bool:
                return self._store.put_if_same(key, data, version=version)

            winners.append(self._race(key, swap))
        return _decided("swap", winners)

    def _race(self, key: str, write: Callable[[str, bytes], bool]) -> int:
        together = threading.Barrier(RACERS)  # all writers begin at the same moment

        def run(_: int) -> bool:
            together.wait()
            return write(key, uuid.uuid4().bytes)

        with ThreadPoolExecutor(RACERS) as pool:
            return sum(pool.map(run, range(RACERS)))

    @staticmethod
    def _guarded(attempt: Callable[[], Finding]) -> Callable[[], Finding]:
        """Return the test with its errors turned into findings."""

        def run() -> Finding:
            try:
                return attempt()
            except StoreError as error:
                remedy = error.hint or ""
                # The hint recommends the command that is running.
                if "--probe-store" in remedy:
                    remedy = "nanochat needs this of a store: use another one"
                return _fail(attempt.__name__, str(error), remedy)
            except ObjectNotFound as error:
                return _fail(attempt.__name__, f"{error} that was just put", "use another store")

        return run


class _BucketTrial:
    """The tests that apply to a bucket only."""

    def __init__(self, store: "S3Store", *, key: Callable[[], str]) -> None:
        self._store = store
        self._key = key

    @functools.cached_property
    def _semantics(self) -> ConditionalWrites:
        return self._store.try_conditions(rounds=ROUNDS)

    def create(self) -> Finding:
        """Test If-None-Match, also under races."""
        return _supported("create", self._semantics.creates, "If-None-Match")

    def swap(self) -> Finding:
        """Test If-Match, also under races."""
        return _supported("swap", self._semantics.swaps, "If-Match")

    def checksum(self) -> Finding:
        """Test that a body that was damaged on its way is refused."""
        if _refuses_damage(self._store, self._key()):
            return Finding(name="checksum", state="ok", found="a damaged body is refused")
        # A store may verify one kind of checksum and ignore another.
        for kind in CHECKSUMS:
            other = type(self._store)(
                self._store.url, settings=replace(self._store.settings, checksum=kind)
            )
            if _refuses_damage(other, self._key()):
                remedy = f"set NANOCHAT_S3_CHECKSUM={kind}: those are verified"
                break
        else:
            remedy = "reach it by https; else damage is found only when an object is fetched"
        return Finding(
            name="checksum", state="warn", found="a damaged body is accepted", remedy=remedy
        )

    def unfinished(self) -> Finding:
        """Test that unfinished uploads can be listed."""
        try:
            uploads = self._store.list_unfinished()
        except StoreError as error:
            return Finding(
                name="unfinished",
                state="warn",
                found=str(error),
                remedy="let the bucket itself drop unfinished uploads, by a lifecycle rule",
            )
        return Finding(
            name="unfinished", state="ok", found=f"{len(uploads)} unfinished uploads are in it"
        )


def find_setting(url: str) -> str | None:
    """Return the setting that makes a bucket accept an object, after it refused one; or None."""
    if not url.startswith("s3:"):
        return None
    from infra.storage.s3.store import S3Store  # loads botocore

    settings = S3Store(url).settings
    others = {
        "NANOCHAT_S3_ADDRESSING=virtual": replace(settings, addressing="virtual"),
        "NANOCHAT_S3_ADDRESSING=path": replace(settings, addressing="path"),
        "NANOCHAT_S3_CHECKSUM=md5": replace(settings, checksum="md5"),
        "NANOCHAT_S3_CHECKSUM=sha256": replace(settings, checksum="sha256"),
    }
    for words, other in others.items():
        store = S3Store(url, settings=other, patience=RetryPolicy(tries=1))
        key = f"{TRIALS}/{uuid.uuid4().hex}/setting"
        with contextlib.suppress(StoreError):
            store.put(key, b"setting")
            store.delete(key)
            return f"set {words}: with it the store takes an object"
    return None


def _refuses_damage(store: "S3Store", key: str) -> bool:
    try:
        store.bucket.put(key, b"damaged", claim=b"whole")
    except (ErrorResponse, NoResponse):
        return True
    return False


def _supported(name: str, support: Support, header: str) -> Finding:
    found = f"the store {describe(support, header)}"
    if support == "atomic":
        return Finding(name=name, state="ok", found=found)
    remedy = "use another store for runs; `push`, `fetch`, `ls` and `plan` work with this one"
    if (support, header) == ("refused", "If-Match"):
        remedy += "; if it wants versions without quotes, set NANOCHAT_S3_ETAG=plain"
    return _fail(name, found, remedy)


def _decided(name: str, winners: Sequence[int]) -> Finding:
    if all(count == 1 for count in winners):
        found = f"of {RACERS} who write at once one wins, {len(winners)} times"
        return Finding(name=name, state="ok", found=found)
    wrong = sum(count != 1 for count in winners)
    return _fail(name, f"{wrong} of {len(winners)} races had not one winner", "use another store")


def _fail(name: str, found: str, remedy: str | None) -> Finding:
    return Finding(name=name, state="fail", found=found, remedy=remedy)
