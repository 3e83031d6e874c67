"""What an artifact store can do: a few verbs on whole, immutable-looking objects under string keys.

A reader sees a whole object or none. `put_if_absent` and `put_if_same` are the operations that
decide anything; listing is for people and for collecting garbage, never for correctness.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from nanochat_core.errors import StoreError

T = TypeVar("T")

# Bytes of a record. A manifest of 10,000 files has 3 MB; a larger object is not one of ours, and
# must not fill the memory of a command that only lists what exists.
MAX_RECORD = 32 << 20
MAX_SEGMENT = 200  # bytes; some stores refuse longer ones
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class ObjectNotFound(Exception):
    """There is no such object. Raised only when the store was reached and said so."""

    fault = "is gone"  # to be said after the object's name, where it must exist

    def __init__(self, key: str) -> None:
        super().__init__(f"no object '{key}'")
        self.key = key


class BadObject(StoreError):
    """What lies at a key is no object of ours: larger than expected, or no plain file."""

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
    age: float  # seconds since it was written, both moments by the store's own clock


OnBytes: TypeAlias = Callable[[int], None]  # told how many more bytes went over; from any thread


def ignore_bytes(count: int) -> None:
    """Nobody watches."""


class Store(Protocol):
    """Every verb raises StoreError when the store cannot be reached or refuses."""

    @property
    def url(self) -> str:
        """The store's address, as `open_store` takes it."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over an older one if need be. Durable on return."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless one exists; whether it was written. Of many writers one wins.

        An object with these very bytes counts as ours: the answer to our own write may be lost.
        """
        ...

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        """Replace an object unless it was written or deleted since `version` was read of it.

        Whether it was replaced. Data that is there already counts as ours, and rewriting the same
        bytes need not change a version: whoever competes, or renews, writes other bytes each time.
        """
        ...

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """Return the object's bytes. Raises Missing, and BadObject if they are too many.

        `size` is what a manifest says: the object exists, so a store that shows it late is asked
        again. None means a record: there may be none, and it has at most MAX_RECORD bytes.
        """
        ...

    def get_stored(self, key: str) -> VersionedObject:
        """Return a record with its version and age. Raises Missing and BadObject."""
        ...

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """`length` bytes of an object from offset `start`; fewer at its end. Raises Missing."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and time of an object. Raises Missing."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in the order of their keys."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""
        ...

    def copy(self, source: str, key: str) -> None:
        """Write the bytes of one object as another, inside the store. Raises Missing."""
        ...

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """Write a local file as an object, over an older one if need be. Durable on return."""
        ...

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        """Write an object to a local file, whole or not at all; read-only. Raises Missing.

        `size` is what a manifest says. A larger object raises BadObject before a byte is written,
        and one that is not found is asked for again: a store may show late what was put.
        The bytes are not verified and not yet durable: whoever asked checks their digest. What a
        killed fetch of the same key to the same path left behind (a hidden `.part` beside the path)
        is gone on with, and counts for `on_bytes` at once.
        """
        ...

    def abort_stale_uploads(self, *, older_than: float) -> int:
        """Drop what writers that died left half written, `older_than` seconds ago; how many."""
        ...

    def missing_guarantees(self) -> Sequence[str]:
        """Return what keeps this store from deciding between writers; asks it once.

        Pieces of a sentence: the store "ignores If-Match". Nothing is built where there are any.
        """
        ...


class StoreUnavailable(StoreError):
    """No answer, or a refusal that passes: the same may succeed later though nobody mends it."""


class Persist(Protocol):
    """Calls an action, perhaps again and again while the store does not answer."""

    def __call__(self, action: Callable[[], T], /) -> T:
        """Return what `action` returns."""
        ...


def call_once(action: Callable[[], T], /) -> T:
    """Call the action and let its StoreUnavailable through."""
    return action()


def check_key(key: str) -> str:
    """Return `key`, if every store can hold it and it cannot leave its store. Raises StoreError."""
    for segment in key.split("/"):
        if not _SEGMENT.fullmatch(segment) or len(segment) > MAX_SEGMENT:
            raise StoreError(
                f"'{key}' cannot be a key of the store",
                hint="names in it are letters, digits, '.', '_' and '-', and start with a "
                "letter, a digit or '_'",
            )
    return key
