"""Sharing of large files: bytes that an earlier artifact of the stage has are not stored again.

An artifact of 170 shards names the 8 of the artifact before it by their keys, which saves upload
and space. A manifest that names files of an older artifact keeps them from being collected
(flows/gc/reach.py); until it is written a pin does.
"""

import contextlib
from collections.abc import Generator, Iterable
from typing import TypeAlias

from flows.artifacts.pins import pin
from flows.identity.fingerprint import Identity
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from infra.storage.base import ObjectNotFound, Store

MIN_SIZE = 1 << 20  # bytes; storing a smaller file costs no more than to look for it
LOOKED_AT = 4  # earlier artifacts

Shared: TypeAlias = dict[tuple[int, str], str]  # size and sha256 -> key of an object


@contextlib.contextmanager
def sharing(
    store: Store, identity: Identity, sizes: Iterable[int], earlier: Iterable[Manifest]
) -> Generator[Shared]:
    """Yield objects of `earlier` artifacts with one of these `sizes`, pinned while the block runs.

    Yields none while garbage is collected.
    """
    large = {size for size in sizes if size >= MIN_SIZE}
    shared: Shared = {}
    if large:
        for manifest in earlier:
            for file in manifest.files:
                if file.size in large:
                    shared.setdefault((file.size, file.sha256), file.key)
    with contextlib.ExitStack() as stack:
        if shared:
            places = {ArtifactRef.parse(key) for key in shared.values()}
            why = f"publishing {identity.ref.name}"
            # A collection under way may be about to delete them; to upload is quicker than to wait.
            try:
                pinned = pin(store, sorted(places), why=why, log=lambda _: None, pause=_do_not_wait)
                stack.enter_context(pinned)
            except _Collecting:
                shared = {}
        yield shared


def find_shared(store: Store, shared: Shared, *, size: int, sha256: str) -> str | None:
    """Return the key of an object with these bytes. None means no such object, or one cut short."""
    key = shared.get((size, sha256))
    if key is None:
        return None
    try:
        return key if store.head(key).size == size else None
    except ObjectNotFound:
        return None


class _Collecting(Exception):
    """Garbage is being collected. Caught in `sharing`."""


def _do_not_wait(seconds: float) -> None:
    raise _Collecting
