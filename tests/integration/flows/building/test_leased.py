"""Several machines and runs, one store: each stage is built once, by the holder of its lease."""

import json
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import find_revoked, revoke
from flows.building.build import build
from flows.identity.fingerprint import Code, identify
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import LeaseLost, LeaseTimings, try_acquire
from flows.leases.lease import LeaseHolder
from infra.launch.torchrun import StageInterrupted
from infra.storage.open import open_store
from tests.support.flows.builder_process import SLOW, bodies, read_until, slow
from tests.support.flows.claims import claim
from tests.support.flows.waiting import wait_until

QUICK = LeaseTimings(ttl=60.0, beat=0.05, poll=0.05, max_poll=0.2)
ENDLESS = "import time\ndef run(job):\n    (job.checkpoints / 'kept').touch()\n    time.sleep(99)\n"


def fingerprint_of(context: Any, stage: Any) -> str:
    return identify(stage, context.run, {}, code=Code(context.root)).fingerprint


def take_over(context: Any, stage: Any, *, redo: int = 0) -> Any:
    """As if the lease had run out: another machine takes it."""
    taken = try_acquire(
        context.store,
        identify(stage, context.run, {}, code=Code(context.root)).redone(redo).ref,
        claim("b"),
        ttl=-1.0,
    )
    assert not isinstance(taken, LeaseHolder)
    return taken


def fail_in_thread(stage: Any, context: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Start a build that will fail, in a thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            build(stage, context, {}, force=False)
        except (StageInterrupted, LeaseLost) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_the_manifest_says_under_which_lease_it_was_built(toys):
    context = toys.context()
    manifest = build(toys.stage("first"), context, {}, force=False).manifest

    said = json.loads(context.store.get(f"first/{manifest.fingerprint}/lease.json"))
    assert manifest.provenance.owner == said["owner"]
    assert manifest.provenance.epoch == said["epoch"] == 1
    assert said["released"]
    assert (said["run"], said["step"], said["total"]) == ("toy-1", 0, 0)  # no heartbeat so soon


def test_heartbeats_tell_the_jobs_last_step(toys):
    context = replace(toys.context(), terms=QUICK)
    stage = toys.stage("slow", source=SLOW)
    key = f"slow/{fingerprint_of(context, stage)}/lease.json"
    thread = threading.Thread(target=build, args=(stage, context, {}), kwargs={"force": False})
    thread.start()

    def steps() -> tuple[int, int]:
        tree = json.loads(context.store.get(key)) if list(context.store.list(key)) else {}
        return tree.get("step", 0), tree.get("total", 0)

    wait_until(lambda: steps() == (310, 900))
    (toys.home.parent / "go").touch()
    thread.join()


def test_a_lost_lease_ends_the_job_and_keeps_what_it_saved(toys):
    stage = toys.stage("endless", source=ENDLESS)
    context = replace(toys.context(), terms=QUICK)
    thread, errors = fail_in_thread(stage, context)
    wait_until(lambda: bool(list(toys.home.glob("work/endless/*/checkpoints/kept"))))

    take_over(context, stage)
    thread.join()

    (error,) = errors
    assert isinstance(error, LeaseLost)
    assert re.fullmatch(r"endless/[0-9a-f]{12} lost its lease to run run-b on host .*", str(error))
    assert "run the same command again" in (error.hint or "")
    assert toys.kinds("endless")[-1] == "failed"
    assert list(toys.home.glob("work/endless/*/checkpoints/kept"))
    (worker,) = toys.home.glob("work/endless/*/result.json")
    assert json.loads(worker.read_text())["status"] == "interrupted"
    assert (
        find_manifest(context.store, ArtifactRef("endless", fingerprint_of(context, stage))) is None
    )


def test_a_run_that_is_stopped_is_interrupted_whatever_its_lease_does(toys):
    stage = toys.stage("endless", source=ENDLESS)
    context = replace(toys.context(), terms=QUICK)
    thread, errors = fail_in_thread(stage, context)
    wait_until(lambda: bool(list(toys.home.glob("work/endless/*/checkpoints/kept"))))

    context.stop.set()
    take_over(context, stage)
    thread.join()

    assert [type(error) for error in errors] == [StageInterrupted]


class TakenAway:
    """A store in which another machine takes the lease while this one uploads its result."""

    def __init__(self, context: Any, stage: Any) -> None:
        self._context = context
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context.store, name)

    def upload(self, key: str, path: Path, **options: Any) -> None:
        self._context.store.upload(key, path, **options)
        take_over(self._context, self._stage)


def test_a_lease_that_is_lost_while_the_result_is_published_keeps_it_from_existing(toys):
    stage = toys.stage("first")
    context = toys.context()  # its next heartbeat is seconds away: only the lease check can notice
    with pytest.raises(LeaseLost, match="to run run-b"):
        build(stage, replace(context, store=TakenAway(context, stage)), {}, force=False)

    assert (
        find_manifest(context.store, ArtifactRef("first", fingerprint_of(context, stage))) is None
    )
    assert list(toys.home.glob("work/first/*/output/value.txt"))


def test_a_lease_that_is_lost_at_once_keeps_the_artifact_of_the_next_owner(toys):
    stage = toys.stage("first")
    context = toys.context("run-1")
    made = build(stage, context, {}, force=False).manifest

    class Taken(TakenAway):
        """Another machine takes the lease as soon as this one has it."""

        def put_if_absent(self, key: str, data: bytes) -> bool:
            done = context.store.put_if_absent(key, data)
            if key.endswith("lease.json"):
                take_over(context, stage, redo=1)
            return done

    late = toys.context("run-2")
    with pytest.raises(LeaseLost, match="to run run-b"):
        build(stage, replace(late, store=Taken(context, stage)), {}, force=True)

    assert find_manifest(context.store, ArtifactRef("first", made.fingerprint)) == made


def test_an_artifact_that_appears_while_one_waits_is_used(toys, tmp_path):
    stage = toys.stage("first")
    away = replace(toys.context("run-9"), store=open_store((tmp_path / "away").as_uri()))
    build(stage, away, {}, force=False)
    context = replace(toys.context(), terms=QUICK)
    take_over(context, stage)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(build(stage, context, {}, force=False)))
    toys.events.clear()
    thread.start()
    wait_until(lambda: "waiting" in [event["kind"] for _, event in toys.events])

    for entry in away.store.list("first/"):
        if not entry.key.endswith("lease.json"):
            context.store.put(entry.key, away.store.get(entry.key))
    thread.join()

    (built,) = results
    assert built.cached
    assert built.manifest.provenance.run == "run-9"


def test_two_machines_that_want_one_artifact_do_the_work_once(toys, builders):
    processes = [builders(name, beat=0.1) for name in ("one", "two")]
    wait_until(lambda: bool(bodies(toys)))
    (first,) = bodies(toys)
    builder, waiter = processes if first == "one" else reversed(processes)
    text = read_until(waiter, "waiting")[-1]["text"]
    (toys.home.parent / "go").touch()

    ends = [read_until(process, "end")[-1] for process in (builder, waiter)]

    assert bodies(toys) == [first]
    assert f"waiting: built by run run-{first} on host " in text
    assert [end["error"] for end in ends] == [None, None]
    assert [end["cached"] for end in ends] == [False, True]


def test_a_killed_builder_of_this_machine_is_succeeded_at_once(toys, builders):
    killed = builders("one")
    read_until(killed, "step")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (toys.home.parent / "go").touch()

    events = read_until(builders("one", ttl=1000.0), "end")

    assert events[-1]["error"] is None
    assert "waiting" not in [event["kind"] for event in events]
    assert bodies(toys) == ["one", "one"]


def test_a_killed_builder_of_another_machine_is_succeeded_when_its_lease_has_run_out(
    toys, builders
):
    killed = builders("one", beat=0.2)
    read_until(killed, "step")
    successor = builders("two", ttl=3.0, beat=0.2)
    events = read_until(successor, "waiting")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (toys.home.parent / "go").touch()

    events += read_until(successor, "end")

    assert events[-1]["error"] is None
    assert "waiting" in [event["kind"] for event in events]
    assert bodies(toys) == ["one", "two"]


def test_a_revoked_artifact_is_built_again_and_the_new_one_is_not_revoked(toys):
    stage = toys.stage("first")
    context = toys.context("run-1")
    old = build(stage, context, {}, force=False).manifest
    revoke(context.store, old, why="wrong", who="me", when="2026-11-21T05:53:38Z")

    new = build(stage, toys.context("run-2"), {}, force=False)

    assert not new.cached
    assert new.manifest.provenance.run == "run-2"
    assert find_revoked(context.store, old) is not None  # the bytes that were taken back still are
    assert find_revoked(context.store, new.manifest) is None
    assert find_manifest(context.store, old.ref) == old
    assert build(stage, toys.context("run-3"), {}, force=False).cached


def test_the_builder_process_builds_the_stage_that_the_test_means(toys):
    context = toys.context()
    assert fingerprint_of(context, toys.stage("slow", source=SLOW)) == fingerprint_of(
        context, slow()
    )
    assert open_store(toys.placement.store).url == context.store.url
