"""How the nodes of one stage hear of each other: a few records in the store.

{stage}/{fingerprint}/checkpoints/nodes/call.json    node 0 says what all of them begin with
{stage}/{fingerprint}/checkpoints/nodes/00001.json   node 1 says that it is there, again and again

They lie beside the checkpoints of the unfinished job because they are worth as much as those, and
go with them. A call counts while its epoch is that of the lease: a node 0 that lost its lease calls
nobody together, and what it writes late is older than what is there.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from flows.identity.fingerprint import short
from flows.identity.record_types import Count, read_record
from flows.identity.records import encode_record, find_stored
from flows.leases.lease import LeaseHolder, LeaseLost, find_holder
from infra.storage.base import Store, StoreUnavailable

FORMAT = 1
_TRIES = 4

# coming: it heard the call and fetches inputs and the checkpoint. ready: it has them, or runs.
# ended: its ranks are gone, or it cannot take part. leaving: it was told to stop.
State: TypeAlias = Literal["coming", "ready", "ended", "leaving"]
MISTAKE = "mistake"

_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class MessagePrefix:
    """What is built together."""

    store: Store
    stage: str
    fingerprint: str

    @property
    def name(self) -> str:
        """As people call it: stage/fingerprint."""
        return f"{self.stage}/{short(self.fingerprint)}"

    def key(self, name: str) -> str:
        """A record of the nodes."""
        return f"{self.stage}/{self.fingerprint}/checkpoints/nodes/{name}.json"


@dataclass(frozen=True, kw_only=True)
class StartMessage:
    """What node 0 tells all others."""

    epoch: Count  # of its lease
    owner: str  # of its lease
    host: str
    nodes: Count
    processes: Count  # on each of them
    step: Count  # of the checkpoint that all go on from; 0: from the beginning
    commit: str  # which checkpoint of that step (checkpoints.commit_of); empty: none
    endpoint: str | None  # host:port to meet at; None until all are ready


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """What another node tells node 0."""

    epoch: Count  # of the call
    node: Count
    host: str
    state: State
    text: str  # why it ended; else empty
    cause: str  # the exception's type; MISTAKE for what a person must mend; empty: the machine's
    who: str  # a process of this number, in one attempt: there should be one
    beat: Count  # no two records have the same bytes
    hint: str | None = None  # what a person can do about `text`


def publish_start(place: MessagePrefix, call: StartMessage, *, fence: Callable[[], None]) -> None:
    """Put a call in the place of an older one. Raises LeaseLost, StoreError.

    `fence` raises when the lease was lost; it is asked after the older call was read, so that a
    newer one cannot be overwritten.
    """
    key, data = place.key("call"), encode_record(asdict(call), format=FORMAT)
    for _ in range(_TRIES):
        found = find_stored(place.store, key, format=FORMAT)
        fence()
        if found is None:
            if place.store.put_if_absent(key, data):
                return
            continue
        older, stored = _read(place, StartMessage, key, found[0]), found[1]
        if older.epoch > call.epoch:
            raise LeaseLost(
                f"{place.name} lost its lease: another node 0, on {older.host}, has called",
                hint="run the same command again: it waits for whoever builds now",
            )
        if place.store.put_if_same(key, data, version=stored.version):
            return
    raise StoreUnavailable(f"{place.store.url}/{key} changes whenever it is written")


def find_start(
    place: MessagePrefix, *, ttl: float
) -> tuple[StartMessage | None, LeaseHolder | None]:
    """The call that counts, and who holds the lease; None where there is none.

    Raises StoreError, and ArtifactError when a record is damaged.
    """
    holder = find_holder(place.store, place.stage, place.fingerprint, ttl=ttl)
    if holder is None:
        return None, None
    key = place.key("call")
    found = find_stored(place.store, key, format=FORMAT)
    if found is None:
        return None, holder
    call = _read(place, StartMessage, key, found[0])
    counts = (call.epoch, call.owner) == (holder.record.epoch, holder.record.owner)
    return (call if counts else None), holder


def publish_status(place: MessagePrefix, said: NodeStatus) -> None:
    """Tell node 0. Raises StoreError."""
    place.store.put(place.key(f"{said.node:05d}"), encode_record(asdict(said), format=FORMAT))


def find_status(place: MessagePrefix, node: int, *, epoch: int) -> tuple[NodeStatus, float] | None:
    """What a node says to the call of this epoch, and how many seconds ago; None: nothing yet.

    Raises StoreError, and ArtifactError when the record is damaged.
    """
    key = place.key(f"{node:05d}")
    found = find_stored(place.store, key, format=FORMAT)
    if found is None or found[0].get("epoch") != epoch:
        return None
    return _read(place, NodeStatus, key, found[0]), found[1].age


def _read(place: MessagePrefix, kind: type[_R], key: str, tree: dict[str, Any]) -> _R:
    return read_record(kind, tree, where=f"{place.store.url}/{key}", what="what a node says")
