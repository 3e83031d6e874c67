"""What keeps an artifact from being collected while somebody is about to use it.

Garbage collection takes a lease, reads what is in use, and deletes the rest (flows/gc/collect.py).
Whoever is about to use an artifact that exists already says so in the store first, in a run's
record or in a pin; then waits while a collection is under way, which may have looked before; then
looks for the artifact again. Either the collector saw what was said, or the artifact is seen to be
gone.

    gc/sweep/lease.json    who is collecting; a lease like that of a fingerprint
    gc/pins/{id}.json      artifacts that a command works with; removed when it ends
"""

import contextlib
import uuid
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from flows.identity.record_types import Digest, Name, read_record
from flows.identity.records import encode_record, find_document
from flows.leases import lease
from infra.storage.base import Store
from nanochat_core.errors import StoreError

SWEEP = ("gc", "sweep")  # in place of a stage and a fingerprint
PINS = "gc/pins/"
FORMAT = 1
SECONDS_BETWEEN_LOOKS = 1.0

Tell: TypeAlias = Callable[[str], None]
Pause: TypeAlias = Callable[[float], None]  # sleeps; raises when the caller is to stop


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Artifacts that are not to be collected."""

    artifacts: tuple[tuple[Name, Digest], ...]  # stage, fingerprint
    why: str


def reserve(store: Store, record: Callable[[], None], *, tell: Tell, pause: Pause) -> None:
    """Keep artifacts from now on, if they are there: the caller looks for them afterwards.

    `record` writes into the store that they are in use. It is called once more after each
    collection that was waited for: what was said during one may have come too late.
    """
    record()
    while wait_for_sweep(store, tell=tell, pause=pause):
        record()


@contextlib.contextmanager
def pin(
    store: Store,
    artifacts: Iterable[tuple[str, str]],
    *,
    why: str,
    tell: Tell,
    pause: Pause,
) -> Generator[None]:
    """Keep these artifacts, with all that lies under their fingerprints, while the block runs.

    For what belongs to no run, and for whoever publishes a manifest that names files of another
    artifact. Whether they are there is looked at inside the block. What a killed process pinned
    stays until its pin is as old as a run's record may get.
    """
    key = f"{PINS}{uuid.uuid4().hex}.json"
    data = encode_record(
        {"artifacts": [list(place) for place in artifacts], "why": why}, format=FORMAT
    )
    try:
        reserve(store, lambda: store.put(key, data), tell=tell, pause=pause)
        yield
    finally:
        with contextlib.suppress(StoreError):  # it expires by itself
            store.delete(key)


def find_pin(store: Store, key: str) -> Pin | None:
    """The pin at `key`. Raises ArtifactError when it is damaged."""
    tree = find_document(store, key, format=FORMAT)
    if tree is None:
        return None
    return read_record(Pin, tree, where=f"{store.url}/{key}", what="a pin")


def wait_for_sweep(store: Store, *, tell: Tell, pause: Pause) -> bool:
    """Wait until nobody collects garbage; whether that took any waiting. Costs one GET if not."""
    told: str | None = None
    while (holder := lease.find_holder(store, *SWEEP)) is not None:
        if told != holder.record.owner:
            told = holder.record.owner
            tell(f"waiting: garbage is being collected by {holder}")
        pause(SECONDS_BETWEEN_LOOKS)
    return told is not None
