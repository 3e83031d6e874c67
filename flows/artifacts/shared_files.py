"""Large files that an earlier artifact of a stage has already: named again, not stored again.

170 shards name the 8 of the artifact before them by its keys, so that neither their upload nor
their space is paid twice. A manifest that names files of an older artifact keeps them from being
collected (flows/gc/reach.py); until it is written a pin does.
"""

import contextlib
from collections.abc import Generator, Iterable
from typing import TypeAlias

from flows.artifacts.pins import pin
from flows.identity.fingerprint import Identity, short
from flows.identity.manifest import Manifest
from infra.storage.base import ObjectNotFound, Store

LEAST_SIZE = 1 << 20  # bytes; storing a smaller file costs no more than looking for it
LOOKED_AT = 4  # earlier artifacts

Shared: TypeAlias = dict[tuple[int, str], str]  # size and sha256 -> key of an object


@contextlib.contextmanager
def sharing(
    store: Store, identity: Identity, sizes: Iterable[int], earlier: Iterable[Manifest]
) -> Generator[Shared]:
    """Objects of `earlier` artifacts with one of these `sizes`, not collected in the block.

    None while garbage is collected, which may be about to delete them: storing files again is
    sooner done than waited for. None either when this artifact was put aside to be built again: a
    person asks for that when the store's bytes are damaged.
    """
    large = {size for size in sizes if size >= LEAST_SIZE}
    shared: Shared = {}
    if large and not _was_put_aside(store, identity):
        for manifest in earlier:
            for file in manifest.files:
                if file.size in large:
                    shared.setdefault((file.size, file.sha256), file.key)
    with contextlib.ExitStack() as stack:
        if shared:
            places = {tuple(key.split("/")[:2]) for key in shared.values()}
            why = f"publishing {identity.stage}/{short(identity.fingerprint)}"
            try:
                stack.enter_context(
                    pin(
                        store,
                        [(stage, fingerprint) for stage, fingerprint in sorted(places)],
                        why=why,
                        tell=_tell_nobody,
                        pause=_do_not_wait,
                    )
                )
            except _Collecting:
                shared = {}
        yield shared


def find_shared(store: Store, shared: Shared, *, size: int, sha256: str) -> str | None:
    """The key of an object with these bytes, if it is there, whole by its size."""
    key = shared.get((size, sha256))
    if key is None:
        return None
    try:
        return key if store.head(key).size == size else None
    except ObjectNotFound:
        return None


class _Collecting(Exception):
    """Garbage is being collected. Nobody sees it."""


def _tell_nobody(text: str) -> None:
    """There is no waiting to tell of."""


def _do_not_wait(seconds: float) -> None:
    raise _Collecting


def _was_put_aside(store: Store, identity: Identity) -> bool:
    older = store.list(f"{identity.stage}/{identity.fingerprint}/superseded/")
    return next(iter(older), None) is not None
