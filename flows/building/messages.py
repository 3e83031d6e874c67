"""Messages between the nodes of a stage, over one connection from each of the others to node 0.

Node 0 listens while it holds the lease, whose record has its address and, as the owner's id, the
secret with which a connection begins. It sends a `Start` to each node that connects, and one with
the rendezvous when all are ready. The others send a `Status` whenever theirs changes, and one with
each checkpoint shard that is in the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from flows.identity.record_types import Count, read_record
from infra.launch.link import LinkLost
from nanochat_core.errors import ArtifactError

# coming: it fetches inputs and the checkpoint. ready: it has them, or its ranks run. ended: its
# ranks are gone, or it cannot take part.
State: TypeAlias = Literal["coming", "ready", "ended"]
# mistake: a retry would fail too. memory: a smaller device batch may fit. machine: retryable.
Failure: TypeAlias = Literal["mistake", "memory", "machine"]

_M = TypeVar("_M", "Start", "Status")


@dataclass(frozen=True, kw_only=True)
class Start:
    """Node 0's message: starts an attempt from the checkpoint that all resume from."""

    epoch: Count  # the fencing token of its lease, which is in the keys of shards
    host: str
    nodes: Count
    processes: Count  # on each of them
    step: Count  # of the checkpoint; 0: from the beginning
    commit: str  # which checkpoint of that step (checkpoints.commit_of); empty: none
    device_batch_size: Count
    endpoint: str | None = None  # host:port of torchrun's rendezvous; None until all are ready
    refused: str | None = None  # why the receiver cannot take part


@dataclass(frozen=True, kw_only=True)
class CheckpointShard:
    """One rank's file of one checkpoint, uploaded to the store."""

    step: Count
    rank: Count
    size: Count  # bytes
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """Another node's message: reports its state in the attempt, or why it ended."""

    node: Count
    host: str
    state: State
    text: str = ""  # why it ended; else empty
    failure: Failure = "machine"  # the kind of `text`
    hint: str | None = None  # what a person can do about `text`
    shard: CheckpointShard | None = None


def read_message(kind: type[_M], tree: Mapping[str, Any]) -> _M:
    """Return a message that was received. Raises LinkLost if the peer is not a node."""
    try:
        return read_record(kind, tree, where="a connection", what="a message of a node")
    except ArtifactError as error:
        raise LinkLost(f"sent no message: {error}") from error
