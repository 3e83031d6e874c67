"""Two nodes that build a stage of the toys in one process, and a connection to node 0."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flows.building.build import BuildContext, Built
from flows.building.messages import Start, Status, read_message
from flows.building.nodes import build_share
from flows.identity.fingerprint import Code, identify
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import LeaseTimings
from flows.leases.lease import find_holder
from flows.stages import Stage
from infra.launch.link import Link, open_link
from infra.storage.open import open_store

QUICK = LeaseTimings(ttl=200.0, beat=1.0, poll=0.1, max_poll=0.2, meet=200.0)


def context_of(toys: Any, directory: Path, name: str) -> BuildContext:
    """Return the context of a machine with a home of this name."""
    home = directory / name
    home.mkdir()
    store = (directory / "shared").as_uri()
    # For a rank to notice that others have ended, which ours cannot.
    resources = replace(toys.placement.resources, grace_seconds=6.0)
    placement = replace(toys.placement, home=home, store=store, nodes=2, resources=resources)
    return replace(
        toys.context(f"run-{name}"),
        placement=placement,
        store=open_store(store),
        terms=QUICK,
        watch=lambda stage, event: None,
        stop=threading.Event(),
    )


def start(
    pool: ThreadPoolExecutor, stage: Stage, context: BuildContext, node: int, *, force: bool = False
) -> "Future[Built]":
    """Build a node's share in a thread."""
    return pool.submit(build_share, stage, context, {}, node=node, force=force)


@contextlib.contextmanager
def connection(stage: Stage, context: BuildContext, first: "Future[Built]") -> Iterator[Link]:
    """Connect to node 0 as another node does, and take its first message."""
    endpoint, secret = port_of(stage, context, first)
    link = open_link(endpoint, secret=secret, silence=100.0)
    assert link is not None
    with contextlib.closing(link):
        read_message(Start, link.receive())
        yield link


def port_of(stage: Stage, context: BuildContext, first: "Future[Built]") -> tuple[str, str]:
    """Wait for node 0's lease; return its endpoint and the secret."""
    fingerprint = identify(stage, context.run, {}, code=Code(context.root)).fingerprint
    ref = ArtifactRef("train", fingerprint)
    while True:
        assert not first.done(), first.result()
        holder = find_holder(context.store, ref)
        if holder is not None and holder.record.endpoint is not None:
            return holder.record.endpoint, holder.record.owner


def say(link: Link, state: Any) -> None:
    """Report the state of node 1."""
    link.send(asdict(Status(node=1, host="b", state=state)))
