"""A run's record says what the run uses before it is used, and after a collection once more."""

from dataclasses import replace
from typing import Any

import pytest

from flows.artifacts.runs import RunRecord, find_run
from flows.building.build import BuildContext, build
from flows.identity.manifest import Manifest
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
    assert find_run(store, "tiny-1") == replace(RUN, stages={"rows": "a" * 64})
    store.delete("runs/tiny-1.json")  # a collection that had not seen it
    record.add(ArtifactRef("rows", "a" * 64))
    record.add(ArtifactRef("sft", "b" * 64))
    found = find_run(store, "tiny-1")
    assert found.stages == {"rows": "a" * 64, "sft": "b" * 64}


def test_the_last_record_has_how_it_ended_and_its_artifacts():
    store = MemoryStore()
    record = RunRecord(store, RUN)
    record.add(ArtifactRef("rows", "a" * 64))
    ended = record.end("failed")
    assert ended == find_run(store, "tiny-1")
    assert (ended.status, ended.stages) == ("failed", {"rows": "a" * 64})
    assert ended.ended is not None
    assert record.end("finished", {"sft": "c" * 64}).stages == {"sft": "c" * 64}


class Collection:
    """Begins when a run first says what it uses, and ends when the run waits for it.

    The run uses an artifact that an earlier one made.
    """

    def __init__(self, toys: Any, *, deletes: str = "") -> None:
        self.stage = toys.stage("first")
        self.made = self.build(toys.context())
        toys.events.clear()
        self.store = toys.context().store
        self.deletes = deletes
        self.said: list[ArtifactRef] = []
        self.held: HeldLease | None = None
        context = toys.context("toy-2")

        def watch(stage: str, event: dict[str, Any]) -> None:
            context.watch(stage, event)
            if event["kind"] == "waiting" and self.held:
                self.held.release()

        self.context = replace(context, record=self.record, watch=watch)

    def record(self, ref: ArtifactRef) -> None:
        self.said.append(ref)
        if self.held is None:
            self.held = start_collection(self.store)
            if self.deletes:
                self.store.delete(f"{ref.prefix}/{self.deletes}")

    def build(self, context: BuildContext) -> Manifest:
        return build(self.stage, context, {}, force=False).manifest

    def reuse(self) -> Manifest:
        """Give the artifact to a run."""
        from flows.orchestration.pipeline import _reused

        return _reused(self.context, self.made).manifest


@pytest.mark.parametrize(
    "use", [lambda met: met.build(met.context), Collection.reuse], ids=["found", "given"]
)
def test_a_run_waits_for_a_collection_and_says_again_what_it_uses(toys, use):
    met = Collection(toys)
    assert use(met) == met.made
    assert met.said == [met.made.ref] * 2
    assert toys.kinds("first") == ["waiting", "cached"]


def test_a_run_builds_what_was_collected_while_it_waited(toys):
    met = Collection(toys, deletes="manifest.json")
    built = met.build(met.context)
    assert built.provenance.run == "toy-2"
    assert built.digest == met.made.digest
    kinds = toys.kinds("first")
    assert (kinds[0], kinds[-1]) == ("waiting", "finished")


def test_a_given_artifact_that_was_collected_before_it_was_recorded_is_an_error(toys):
    met = Collection(toys, deletes="manifest.json")
    with pytest.raises(ArtifactError, match=f"{met.made.name} was deleted from .* by a garbage"):
        met.reuse()


def test_a_run_that_is_stopped_does_not_wait_for_the_collections_end(toys):
    met = Collection(toys)
    stop = met.context.stop

    def watch(stage: str, event: dict[str, Any]) -> None:
        if event["kind"] == "waiting":
            stop.set()

    with pytest.raises(StageInterrupted, match="the run is being stopped"):
        met.build(replace(met.context, watch=watch))
