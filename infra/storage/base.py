"""The `Store` protocol: a few verbs on whole, immutable-looking objects under string keys.

A reader sees a whole object or none. Only `put_if_absent` and `put_if_same` decide between writers;
listing is for people and for garbage collection, never for correctness.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from nanochat_core.errors import StoreError

T = TypeVar("T")

# Bytes of a record. A manifest of 10,000 files has 3 MB; a larger object is not one of ours, and
# must not fill the memory of a command that only lists what exists.
MAX_RECORD = 32 << 20
SWAPS = 20  # each fails only if another process's succeeded: more failures take a crowd
MAX_SEGMENT = 200  # bytes; some stores refuse longer ones
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class ObjectNotFound(Exception):
    """An object that does not exist. Raised only if the store was reached and said so."""

    fault = "is gone"  # to be said after the object's name, where it must exist

    def __init__(self, key: str) -> None:
        super().__init__(f"no object '{key}'")
        self.key = key


class BadObject(StoreError):
    """An object that is not one of ours: larger than expected, or not a plain file."""

    def __init__(self, where: str, fault: str) -> None:
        super().__init__(
            f"{where} {fault}",
            hint="something else wrote it: look at it there, and remove it if it is not yours",
        )
        self.fault = fault  # to be said after the object's name


def check_size(where: str, size: int, limit: int) -> None:
    """Raise BadObject if an object has more bytes than it may have."""
    if size > limit:
        raise BadObject(where, f"has {size} bytes, expected are {limit} at most")


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """An object, without its bytes."""

    key: str
    size: int  # bytes
    modified: float  # unix seconds, by the store's clock


@dataclass(frozen=True, kw_only=True)
class VersionedObject:
    """An object as it was read at one moment."""

    data: bytes
    version: str  # opaque; another one when the bytes are others, perhaps when they are the same
    age: float  # seconds since it was written, by the store's clock if it has one; for people


# Called with the number of bytes transferred since the last call, from any thread. A negative
# number: so many are transferred again.
OnBytes: TypeAlias = Callable[[int], None]


def ignore_bytes(count: int) -> None:
    """Do nothing: the default `on_bytes`."""


class Store(Protocol):
    """An object store. Every verb raises StoreError if the store cannot be reached or refuses."""

    @property
    def url(self) -> str:
        """Return the store's address, as `open_store` takes it."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over an older one if need be. Durable on return."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless one exists; return whether it was written. One writer wins.

        An object with these very bytes counts as ours: the answer to our own write may be lost.
        """
        ...

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        """Replace an object if its version is still `version`; return whether it was replaced.

        False means that it was written or deleted since. An object that already has these bytes
        counts as replaced. Rewriting the same bytes need not change a version, so a caller that
        competes for a key, or renews a lease, must write other bytes each time.
        """
        ...

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """Return the object's bytes. Raises ObjectNotFound, and BadObject if they are too many.

        `size` is what a manifest says; None means a record, of at most MAX_RECORD bytes.
        """
        ...

    def get_stored(self, key: str) -> VersionedObject:
        """Return a record with its version and age. Raises ObjectNotFound and BadObject."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Return size and time of an object. Raises ObjectNotFound."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix`, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; do nothing if it does not exist."""
        ...

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """Write a local file as an object, over an older one if need be. Durable on return."""
        ...

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        """Write an object to a read-only local file, whole or not at all. Raises ObjectNotFound.

        `size` is what a manifest says. A larger object raises BadObject before a byte is written.
        The bytes are not verified and not yet durable: the caller checks their digest. A killed
        fetch leaves a hidden file, of a name with `.part` in it, next to the path.
        """
        ...

    def abort_stale_uploads(self, *, before: float) -> int:
        """Drop unfinished writes begun before this time of the store's clock; return how many."""
        ...

    def check_conditions(self) -> None:
        """Raise StoreError if the store has no atomic put_if_absent and put_if_same.

        Probes it once. Both verbs do this first; a caller does it before other work.
        """
        ...


class StoreUnavailable(StoreError):
    """No answer, or a temporary refusal: the same request may succeed later without a repair."""


class Retry(Protocol):
    """A caller of actions that may retry them while the store does not answer."""

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return the result of `action`."""
        ...


def call_once(action: Callable[[], T], /) -> T:
    """Call the action and let its StoreUnavailable through."""
    return action()


def swap_until_won(what: str, swap: Callable[[], T | None]) -> T:
    """Return what `swap` returns once it is not None.

    `swap` reads a record and replaces it if it is still the one that was read; None means that
    another process wrote in between. Raises StoreUnavailable if that happens each time.
    """
    for _ in range(SWAPS):
        if (won := swap()) is not None:
            return won
    raise StoreUnavailable(
        f"{what} changes faster than it can be written",
        hint="another process writes it again and again; run the command again later",
    )


def check_key(key: str) -> str:
    """Return `key`, if every store can hold it and it cannot leave its store. Raises StoreError."""
    # No segment may begin with a dot: "." and ".." would leave a directory store, and names such as
    # its own ".tmp" stay free of objects.
    for segment in key.split("/"):
        if not _SEGMENT.fullmatch(segment) or len(segment) > MAX_SEGMENT:
            raise StoreError(
                f"'{key}' cannot be a key of the store",
                hint="names in it are letters, digits, '.', '_' and '-', and start with a "
                "letter, a digit or '_'",
            )
    return key
