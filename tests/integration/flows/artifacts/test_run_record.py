"""A run's record says what the run uses before it is used, and after a collection once more."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from flows.artifacts.runs import RunRecord, find_run
from flows.building.build import BuildContext, build
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import HeldLease
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ArtifactError
from tests.support.flows.house import make_run
from tests.support.flows.rubbish import start_collection
from tests.support.reliability.memory_store import MemoryStore

RUN = replace(make_run("tiny-1"), name="tiny")


def test_each_artifact_is_written_at_once_and_again_when_it_is_said_again():
    store = MemoryStore()
    record = RunRecord(store, RUN)
    record.write()
    record.add(ArtifactRef("rows", "a" * 64))
    assert find_run(store, "tiny-1") == dataclasses.replace(RUN, stages={"rows": "a" * 64})
    store.delete("runs/tiny-1.json")  # a collection that had not seen it
    record.add(ArtifactRef("rows", "a" * 64))
    record.add(ArtifactRef("sft", "b" * 64))
    found = find_run(store, "tiny-1")
    assert found.stages == {"rows": "a" * 64, "sft": "b" * 64}


class Collection:
    """Begins when the run first says what it uses, and ends when the run waits for it."""

    def __init__(self, toys: Any, *, deletes: str = "") -> None:
        self.store = toys.context().store
        self.deletes = deletes
        self.said: list[ArtifactRef] = []
        self.held: HeldLease | None = None

    def record(self, ref: ArtifactRef) -> None:
        self.said.append(ref)
        if self.held is None:
            self.held = start_collection(self.store)
            if self.deletes:
                self.store.delete(f"{ref.prefix}/{self.deletes}")

    def context(self, toys: Any) -> BuildContext:
        """A run that the collection meets."""
        context = toys.context("toy-2")

        def watch(stage: str, event: dict[str, Any]) -> None:
            context.watch(stage, event)
            if event["kind"] == "waiting" and self.held:
                self.held.release()

        return dataclasses.replace(context, record=self.record, watch=watch)


def test_a_run_waits_for_a_collection_and_says_again_what_it_uses(toys):
    stage = toys.stage("first")
    made = build(stage, toys.context(), {}, force=False).manifest
    toys.events.clear()
    collection = Collection(toys)
    context = collection.context(toys)
    built = build(stage, context, {}, force=False)
    assert built.cached
    assert built.manifest == made
    assert collection.said == [("first", made.fingerprint)] * 2
    assert toys.kinds("first") == ["waiting", "cached"]


def test_a_run_builds_what_was_collected_while_it_waited(toys):
    stage = toys.stage("first")
    made = build(stage, toys.context(), {}, force=False).manifest
    toys.events.clear()
    collection = Collection(toys, deletes="manifest.json")
    context = collection.context(toys)
    built = build(stage, context, {}, force=False)
    assert not built.cached
    assert built.manifest.provenance.run == "toy-2"
    assert built.manifest.digest == made.digest
    kinds = toys.kinds("first")
    assert kinds[0] == "waiting"
    assert kinds[-1] == "finished"


def test_a_given_artifact_is_recorded_again_after_a_collection(toys):
    from flows.orchestration.pipeline import _reused

    made = build(toys.stage("first"), toys.context(), {}, force=False).manifest
    toys.events.clear()
    collection = Collection(toys)
    context = collection.context(toys)
    assert _reused(context, made).manifest == made
    assert collection.said == [("first", made.fingerprint)] * 2
    assert toys.kinds("first") == ["waiting", "cached"]


def test_a_given_artifact_that_was_collected_before_it_was_recorded_is_an_error(toys):
    from flows.orchestration.pipeline import _reused

    made = build(toys.stage("first"), toys.context(), {}, force=False).manifest
    collection = Collection(toys, deletes="manifest.json")
    context = collection.context(toys)
    with pytest.raises(ArtifactError, match=f"{made.name} was deleted from .* by a garbage"):
        _reused(context, made)


def test_a_run_that_is_stopped_does_not_wait_for_the_collections_end(toys):
    stage = toys.stage("first")
    build(stage, toys.context(), {}, force=False)
    collection = Collection(toys)
    context = toys.context("toy-2")
    context = dataclasses.replace(
        context,
        record=collection.record,
        watch=lambda _, event: context.stop.set() if event["kind"] == "waiting" else None,
    )
    with pytest.raises(StageInterrupted, match="the run is being stopped"):
        build(stage, context, {}, force=False)
