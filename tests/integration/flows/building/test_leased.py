"""Several machines and runs, one store: each stage is built once, by the holder of its lease."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
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
from flows.leases.lease import LeaseHolder, find_holder
from infra.launch.torchrun import StageInterrupted
from tests.support.flows.claims import claim
from tests.support.flows.waiting import wait_until

QUICK = LeaseTimings(ttl=60.0, beat=0.05, poll=0.05, max_poll=0.2)
ENDLESS = """
import time
from nanochat_core.runtime.progress import Progress


def run(job):
    (job.checkpoints / "kept").touch()
    progress = Progress(job.events)
    progress.start(900)
    progress.step(310)
    try:
        time.sleep(99)
    finally:
        time.sleep(0.5)  # it saves for some heartbeats
"""


def ref_of(context: Any, stage: Any) -> ArtifactRef:
    return identify(stage, context.run, {}, code=Code(context.root)).ref


def take_over(context: Any, stage: Any) -> None:
    """As if the lease had run out: another machine takes it."""
    taken = try_acquire(context.store, ref_of(context, stage), claim("b"), ttl=-1.0)
    assert not isinstance(taken, LeaseHolder)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_lost_lease_ends_the_job_and_keeps_what_it_saved(toys, is_stopped):
    stage = toys.stage("endless", source=ENDLESS)
    context = replace(toys.context(), terms=QUICK)
    ref = ref_of(context, stage)

    def step() -> str:
        return str(find_holder(context.store, ref)).partition(", ")[2]

    with ThreadPoolExecutor() as pool:
        building = pool.submit(build, stage, context, {}, force=False)
        wait_until(lambda: step().startswith("step 310/900"))  # a heartbeat has it
        if is_stopped:
            context.stop.set()
        take_over(context, stage)
        error = building.exception()

    assert list(toys.home.glob("work/endless/*/checkpoints/kept"))
    (worker,) = toys.home.glob("work/endless/*/result.json")
    assert json.loads(worker.read_text())["status"] == "interrupted"
    assert find_manifest(context.store, ref) is None
    if is_stopped:
        assert isinstance(error, StageInterrupted)
        return
    assert isinstance(error, LeaseLost)
    assert re.fullmatch(r"endless/[0-9a-f]{12} lost its lease to run run-b on host .*", str(error))
    assert "run the same command again" in (error.hint or "")
    assert toys.kinds("endless")[-1] == "failed"


def test_a_lease_that_is_lost_while_the_result_is_published_keeps_it_from_existing(
    toys, monkeypatch
):
    stage = toys.stage("first")
    context = toys.context()  # its next heartbeat is seconds away: only the lease check can notice
    upload = context.store.upload

    def upload_and_lose(key: str, path: Path, **options: Any) -> None:
        upload(key, path, **options)
        take_over(context, stage)

    monkeypatch.setattr(context.store, "upload", upload_and_lose)
    with pytest.raises(LeaseLost, match="to run run-b"):
        build(stage, context, {}, force=False)

    assert find_manifest(context.store, ref_of(context, stage)) is None
    assert list(toys.home.glob("work/first/*/output/value.txt"))


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
