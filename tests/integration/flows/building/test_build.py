"""Reuse, lease, fetch, run, publish: what happens to one stage, without Prefect."""

import json
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import Revocation, put_revocation
from flows.building.build import build, look_up
from flows.identity.redo import find_redo
from infra.launch import torchrun
from infra.launch.torchrun import JobFailed
from infra.storage.open import open_store
from nanochat_core.errors import StageError, StoreError
from nanochat_core.runtime.versions import processor_name
from tests.support.flows.waiting import wait_until

# Ends when there is a file `go` in its home.
SLOW = """
import time


def run(job):
    while not (job.directory.parents[2] / "go").exists():
        time.sleep(0.02)
    (job.output / "a").write_text("a")
    return {}
"""

# Has memory for two rows, and is broken as other toys are.
NARROW = """
from nanochat_core.errors import OutOfMemory


def run(job):
    rows = job.resources.device_batch_size
    with (job.checkpoints / "tries").open("a") as file:
        file.write(f"{rows} ")
    if rows > 2:
        raise OutOfMemory(f"out of memory with {rows} rows")
    if (job.directory.parents[2] / "broken" / "first").exists():
        raise ValueError("broken")
    (job.output / "a").write_text((job.checkpoints / "tries").read_text())
    return {}
"""


def test_a_stage_without_memory_starts_again_with_half_the_rows_and_remembers_them(toys):
    stage, context = toys.stage("first", source=NARROW), toys.context()
    resources = replace(context.placement.resources, device_batch_size=8)
    context = replace(context, placement=replace(context.placement, resources=resources))
    toys.set_broken("first")
    with pytest.raises(JobFailed, match="ValueError: broken"):
        build(stage, context, {}, force=False)
    logged = [event["text"] for _, event in toys.events if event["kind"] == "message"]
    toys.set_broken("first", False)
    manifest = build(stage, context, {}, force=False).manifest

    assert [text.partition(";")[2] for text in logged if "out of memory" in text] == [
        " it starts again with 4 rows, from what it saved",
        " it starts again with 2 rows, from what it saved",
    ]
    segments = [segment["device_batch_size"] for segment in manifest.provenance.segments]
    assert segments == [8, 4, 2, 2]
    assert open_store(toys.placement.store).get(manifest.files[0].key) == b"8 4 2 2 "


def test_a_stage_is_built_once_and_reused_afterwards(toys):
    first = toys.stage("first")
    second = toys.stage("second", first)
    context = toys.context()

    made = build(first, context, {}, force=False)
    after = build(second, context, {"first": made.manifest}, force=False)
    logged = toys.kinds("second")
    again = build(second, context, {"first": made.manifest}, force=False)

    assert (made.cached, after.cached, again.cached) == (False, False, True)
    assert logged == ["fetching", "building", "start", "step", "step", "finished"]
    assert toys.kinds("second") == ["cached"]
    assert again.manifest == after.manifest
    store = open_store(toys.placement.store)
    assert store.get(after.manifest.files[0].key) == b"first+second"
    assert after.manifest.provenance.metrics == {"length": 12}


def test_the_manifest_says_how_the_stage_was_executed_and_under_which_lease(toys):
    context = toys.context("run-7")
    manifest = build(toys.stage("first"), context, {}, force=False).manifest

    lease = json.loads(context.store.get(manifest.ref.lease_key))
    assert lease["released"]
    provenance = manifest.provenance
    assert (provenance.run, provenance.owner, provenance.epoch) == ("run-7", lease["owner"], 1)
    assert [log.path for log in manifest.logs] == ["events.jsonl", "metrics.parquet"]
    assert manifest.provenance.versions == {  # no package is loaded
        "python": platform.python_version(),
        "processor": processor_name(),
    }
    (segment,) = manifest.provenance.segments
    assert (segment["first_step"], segment["last_step"]) == (0, 2)
    assert (segment["device"], segment["processes"], segment["threads"]) == ("cpu", 1, 1)
    seconds = segment["ended"] - segment["started"]
    assert seconds > 0
    assert segment["dollars"] == pytest.approx(seconds / 1000, abs=1e-4)


def test_a_failed_stage_keeps_its_job_and_resumes_in_it(toys):
    first = toys.stage("first")
    toys.set_broken("first")
    with pytest.raises(JobFailed, match="ValueError: broken"):
        build(first, toys.context(), {}, force=False)
    (job,) = (toys.home / "work" / "first").glob("*/job.json")
    (job.parent / "checkpoints" / "state").write_text("kept")
    (job.parent / "output" / ".half.tmp").write_text("not kept")
    kind, event = toys.events[-1][1]["kind"], toys.events[-1][1]
    assert kind == "failed"
    assert "ValueError" in event["log_tail"]

    toys.set_broken("first", False)
    manifest = build(first, toys.context(), {}, force=False).manifest
    assert [file.path for file in manifest.files] == ["value.txt"]
    assert len(manifest.provenance.segments) == 2
    assert not job.parent.exists()


def test_a_full_disk_is_named(toys, monkeypatch):
    first = toys.stage("first")
    toys.set_broken("first")
    with pytest.raises(JobFailed):
        build(first, toys.context(), {}, force=False)
    (job,) = (toys.home / "work" / "first").glob("*/job.json")
    segments = job.parent / "segments.jsonl"
    segments.unlink()
    segments.symlink_to("/dev/full")  # which this process writes

    with pytest.raises(StageError, match=f"^first: no space left on device: {toys.home}"):
        build(first, toys.context(), {}, force=False)
    assert toys.events[-1][1]["hint"].startswith("free some space")

    # A worker that cannot even write its error ends without a word.
    mute = toys.stage("first", source="import os\n\n\ndef run(job):\n    os._exit(1)\n")
    monkeypatch.setattr(torchrun, "_MIN_FREE", 2**62)
    with pytest.raises(StageError, match=r"^first: no space left on device: "):
        build(mute, toys.context(), {}, force=False)


def test_a_forced_run_resumes_from_what_its_earlier_attempt_saved(toys):
    first = toys.stage("first")
    old = build(first, toys.context("run-1"), {}, force=False).manifest
    toys.set_broken("first")

    def attempt(run: str, *, force: bool = True) -> Path:
        with pytest.raises(JobFailed):
            build(first, toys.context(run), {}, force=force)
        assert find_manifest(toys.context().store, old.ref) == old
        jobs = (toys.home / "work" / "first").glob("*/job.json")
        job = max(jobs, key=lambda path: path.stat().st_mtime_ns)
        return job.parent / "checkpoints" / "state"

    attempt("run-2").write_text("saved")
    assert attempt("run-2").exists()
    assert not attempt("run-3").exists()  # another run that wants it made anew
    attempt("run-3").write_text("saved")
    assert attempt("run-4", force=False).exists()  # one that only wants it
    toys.set_broken("first", False)
    new = build(first, toys.context("run-5"), {}, force=False)
    assert (new.cached, new.manifest.provenance.run) == (False, "run-5")
    assert build(first, toys.context("run-6"), {}, force=False).manifest == new.manifest
    assert not [e for e in toys.context().store.list("first/") if "/checkpoints/" in e.key]


def test_each_of_two_forced_runs_asks_once_and_keeps_the_old_artifact(toys):
    first = toys.stage("first")
    old = build(first, toys.context("run-1"), {}, force=False).manifest

    def number(run: str) -> int:
        return look_up(first, toys.context(run), {}, force=True).identity.redo

    assert [number(run) for run in ("run-2", "run-3")] == [1, 1]  # no run has begun it
    again = build(first, toys.context("run-2"), {}, force=True)
    assert not again.cached
    assert (again.manifest.provenance.run, again.manifest.identity.redo) == ("run-2", 1)
    assert again.manifest.digest == old.digest
    assert build(first, toys.context("run-2"), {}, force=True).cached  # this run built it already
    # Run 3 asked before that was begun, and takes it; run 4 asks after it.
    assert [number(run) for run in ("run-3", "run-4", "run-2")] == [1, 2, 2]
    store = toys.context().store
    assert find_redo(store, old.ref).before == 1
    assert find_manifest(store, old.ref) == old


def test_a_forced_run_that_begins_a_stage_resumes_what_it_saved(toys):
    first = toys.stage("first")
    toys.set_broken("first")
    for _ in range(2):
        with pytest.raises(JobFailed):
            build(first, toys.context("run-1"), {}, force=True)
    assert len(list((toys.home / "work" / "first").glob("*/job.json"))) == 1
    toys.set_broken("first", False)
    made = build(first, toys.context("run-1"), {}, force=True).manifest
    assert (made.identity.redo, len(made.provenance.segments)) == (0, 3)


def test_a_revocation_that_came_without_its_artifact_counts(toys):
    first, context = toys.stage("first"), toys.context()
    recipe = look_up(first, context, {}, force=False).identity
    put_revocation(context.store, recipe.ref, Revocation(why="wrong", when="", who="me"))
    assert build(first, context, {}, force=False).manifest.identity == recipe.redone(1)
    assert build(first, context, {}, force=False).cached


def test_a_result_that_changed_is_reported(toys):
    source = """
import os

def run(job):
    (job.output / "a").write_text(str(os.getpid()))
    return {}
"""
    first = toys.stage("first", source=source)
    build(first, toys.context("run-1"), {}, force=False)
    assert "warning" not in toys.kinds("first")

    build(first, toys.context("run-2"), {}, force=True)

    assert "warning" in toys.kinds("first")


def test_a_store_that_cannot_be_reached_is_an_error_and_nothing_runs(toys):
    first = toys.stage("first")
    away = open_store((toys.home / "unmounted" / "store").as_uri())

    with pytest.raises(StoreError, match="cannot be reached"):
        build(first, replace(toys.context(), store=away), {}, force=False)

    assert toys.kinds("first") == ["failed"]
    assert not (toys.home / "work").exists()


def test_gpu_stages_run_one_at_a_time(toys):
    stages = [toys.stage(name, compute="gpu", source=SLOW) for name in ("one", "two")]
    context = toys.context()
    with ThreadPoolExecutor(2) as pool:
        for stage in stages:
            pool.submit(build, stage, context, {}, force=False)
        wait_until(lambda: "building" in [event["kind"] for _, event in toys.events])
        (toys.home / "go").touch()

    order = [event["kind"] for _, event in toys.events if event["kind"] in ("building", "finished")]
    assert order == ["building", "finished", "building", "finished"]


def test_code_the_fingerprint_does_not_see_is_an_error_when_strict_and_else_a_warning(toys):
    source = """
import importlib

def run(job):
    importlib.import_module("nanochat_core.runtime.seeding")
    (job.output / "a").write_text("a")
    return {}
"""
    sneaky = toys.stage("sneaky", source=source)

    with pytest.raises(StageError, match=r"does not see: nanochat_core\.runtime\.seeding"):
        build(sneaky, toys.context(strict=True), {}, force=False)
    assert not build(sneaky, toys.context(strict=False), {}, force=False).cached

    assert "warning" in toys.kinds("sneaky")
