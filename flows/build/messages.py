"""Messages between the nodes of one stage: a few records in the store.

{stage}/{fingerprint}/checkpoints/nodes/call.json    node 0's StartMessage
{stage}/{fingerprint}/checkpoints/nodes/00001.json   node 1's NodeStatus, rewritten as a heartbeat

They lie under the checkpoints of the unfinished job and are deleted with them. A start message is
valid while its epoch (the fencing token of node 0's lease) is that of the lease: a node 0 that lost
its lease starts no other node, and what it writes late has an older epoch and is ignored.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from flows.identity.record_types import Count, read_record
from flows.identity.records import encode_record, find_stored
from flows.identity.ref import ArtifactRef
from flows.leases.lease import LeaseHolder, LeaseLost, find_holder
from infra.storage.base import Store, StoreUnavailable

FORMAT = 1
_TRIES = 4  # each fails only if another node 0 wrote in between

# coming: it read the start message and fetches inputs and the checkpoint. ready: it has them, or
# its ranks run. ended: its ranks are gone, or it cannot take part. leaving: it was stopped by a
# signal or a cancelled run, and will not follow the next start message.
State: TypeAlias = Literal["coming", "ready", "ended", "leaving"]
MISTAKE = "mistake"

_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class MessagePrefix:
    """The place of one stage's messages: a store and the key prefix of a fingerprint."""

    store: Store
    ref: ArtifactRef

    def key(self, name: str) -> str:
        """Return the key of a message: "call", or a node's number in five digits."""
        return self.ref.node_key(name)


@dataclass(frozen=True, kw_only=True)
class StartMessage:
    """Node 0's message to all others: start an attempt from this checkpoint."""

    epoch: Count  # of its lease
    owner: str  # of its lease
    host: str
    nodes: Count
    processes: Count  # on each of them
    step: Count  # of the checkpoint that all resume from; 0: from the beginning
    commit: str  # which checkpoint of that step (checkpoints.commit_of); empty: none
    endpoint: str | None  # host:port of the rendezvous; None until all are ready


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """Another node's status in an attempt, for node 0."""

    epoch: Count  # of the start message it follows
    node: Count
    host: str
    state: State
    text: str  # why it ended; else empty
    cause: str  # the exception's type; MISTAKE for what a person must fix; empty: the machine's
    who: str  # random id of the process in one attempt: shows a restart, or a number used twice
    beat: Count  # of writes by this process: no two records have the same bytes, nor the same ETag
    hint: str | None = None  # what a person can do about `text`


def publish_start(place: MessagePrefix, call: StartMessage, *, fence: Callable[[], None]) -> None:
    """Replace an older start message. Raises LeaseLost, StoreError.

    `fence` raises if the lease is lost.
    """
    key, data = place.key("call"), encode_record(asdict(call), format=FORMAT)
    for _ in range(_TRIES):
        found = find_stored(place.store, key, format=FORMAT)
        # After the read: a newer node 0 that writes later changes the version, so that our
        # conditional put fails and cannot overwrite its message.
        fence()
        if found is None:
            if place.store.put_if_absent(key, data):
                return
            continue
        older, stored = _read(place, StartMessage, key, found[0]), found[1]
        if older.epoch > call.epoch:
            raise LeaseLost(
                f"{place.ref.name} lost its lease: another node 0, on {older.host}, has started",
                hint="if the run does not retry by itself, run the same command again: it waits "
                "for the current builder and uses its artifact",
            )
        if place.store.put_if_same(key, data, version=stored.version):
            return
    raise StoreUnavailable(f"{place.store.url}/{key} changes whenever it is written")


def find_start(
    place: MessagePrefix, *, ttl: float
) -> tuple[StartMessage | None, LeaseHolder | None]:
    """Return the valid start message and the holder of the lease; None for either that is missing.

    Raises StoreError, and ArtifactError if a record is damaged.
    """
    holder = find_holder(place.store, place.ref, ttl=ttl)
    if holder is None:
        return None, None
    key = place.key("call")
    found = find_stored(place.store, key, format=FORMAT)
    if found is None:
        return None, holder
    call = _read(place, StartMessage, key, found[0])
    # The message of an earlier attempt stays in the store: only one by the holder counts.
    counts = (call.epoch, call.owner) == (holder.record.epoch, holder.record.owner)
    return (call if counts else None), holder


def publish_status(place: MessagePrefix, said: NodeStatus) -> None:
    """Write this node's status, which is also its heartbeat. Raises StoreError."""
    place.store.put(place.key(f"{said.node:05d}"), encode_record(asdict(said), format=FORMAT))


def find_status(place: MessagePrefix, node: int, *, epoch: int) -> tuple[NodeStatus, float] | None:
    """Return a node's status for this epoch and its age in seconds. None: no status yet.

    The age is by the store's clock: the nodes' own clocks may differ. Raises StoreError, and
    ArtifactError if the record is damaged.
    """
    key = place.key(f"{node:05d}")
    found = find_stored(place.store, key, format=FORMAT)
    if found is None or found[0].get("epoch") != epoch:
        return None
    return _read(place, NodeStatus, key, found[0]), found[1].age


def _read(place: MessagePrefix, kind: type[_R], key: str, tree: dict[str, Any]) -> _R:
    return read_record(kind, tree, where=f"{place.store.url}/{key}", what="a message of the nodes")
