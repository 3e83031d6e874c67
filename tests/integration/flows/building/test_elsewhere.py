"""An unfinished job resumes in another home, from the checkpoints in the store they share."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts import checkpoints
from flows.artifacts.cache import Cache, fetch
from flows.building.build import BuildContext, build
from flows.identity.fingerprint import Code, Identity, identify
from flows.identity.redo import RedoCounter, find_redo, raise_redo
from flows.identity.ref import ArtifactRef
from flows.plan.reads import find_resume
from infra.launch.torchrun import JobFailed
from infra.storage.open import open_store
from tests.support.flows.fixtures import SAVE

# Saves after each of three steps; fails after the second, unless it began with what another one
# had saved. Its result says at which step it began.
ENTRY = (
    SAVE
    + """
def run(job):
    found = sorted(job.checkpoints.glob("step-*"))
    start = int(found[-1].name.removeprefix("step-")) if found else 0
    progress = Progress(job.events)
    progress.start(3, step=start)
    for step in range(start + 1, 4):
        progress.step(step, loss=1.0 / step)
        save(job, step, 3)
        if step == 2 and not found:
            raise ValueError("the machine is gone")
    (job.output / "value.txt").write_text(f"began at {start}")
    return {}
"""
)


def context_at(toys: Any, home: Path, shared: Path) -> BuildContext:
    home.mkdir(exist_ok=True)
    placement = replace(toys.placement, home=home, store=shared.as_uri())
    return replace(toys.context(), placement=placement, store=open_store(placement.store))


def result_of(context: BuildContext, manifest: Any, cache: Path) -> str:
    with Cache(cache, 10**9) as local:
        return (fetch(context.store, manifest, local) / "files" / "value.txt").read_text()


def test_a_job_resumes_in_another_home(toys, tmp_path):
    stage = toys.stage("train", source=ENTRY)
    here, there = (context_at(toys, tmp_path / name, tmp_path / "shared") for name in ("a", "b"))
    with pytest.raises(JobFailed):
        build(stage, here, {}, force=False)
    shutil.rmtree(tmp_path / "a")
    logged: list[str] = []
    there = replace(there, watch=lambda _, event: logged.append(str(event.get("text"))))
    built = build(stage, there, {}, force=False)
    assert result_of(there, built.manifest, tmp_path / "cache") == "began at 2"
    assert "fetching checkpoint step 2/3 from the store" in logged
    first, second = built.manifest.provenance.segments
    assert (first["last_step"], second["first_step"], second["last_step"]) == (2, 2, 3)
    fingerprint = built.manifest.fingerprint
    assert not list(there.store.list(f"train/{fingerprint}/checkpoints/"))  # of no use any more
    log = next(f for f in built.manifest.logs if f.path == "events.jsonl")
    steps = [json.loads(line) for line in there.store.get(log.key).splitlines()]
    assert [e["step"] for e in steps if e["kind"] == "step"] == [1, 2, 3]


def test_a_store_inside_the_home_holds_no_second_copy(toys, tmp_path):
    stage = toys.stage("train", source=ENTRY)
    context = context_at(toys, toys.home, toys.home / "store")
    with pytest.raises(JobFailed):
        build(stage, context, {}, force=False)
    assert not [e.key for e in context.store.list("train/") if "/checkpoints/" in e.key]


def test_a_job_resumes_from_a_checkpoint_that_another_machine_sent_into_its_home(toys, tmp_path):
    """As `nanochat plan` says: both ask the store."""
    stage = toys.stage("train", source=ENTRY)
    store = toys.home / "store"
    with pytest.raises(JobFailed):
        build(stage, context_at(toys, tmp_path / "b", store), {}, force=False)
    context = context_at(toys, toys.home, store)
    identity = identify(stage, context.run, {}, code=Code(context.root))
    assert str(find_resume(context.store, context.work, identity)) == "step 2/3, from the store"

    built = build(stage, context, {}, force=False)

    assert result_of(context, built.manifest, tmp_path / "cache") == "began at 2"
    fingerprint = built.manifest.fingerprint
    assert not list(context.store.list(f"train/{fingerprint}/checkpoints/"))


class Recorded:
    """A store that records which keys were uploaded."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.uploads: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def upload(self, key: str, path: Path, **options: Any) -> None:
        self.uploads.append(key)
        self._store.upload(key, path, **options)

    def steps(self) -> set[str]:
        """Steps of which a checkpoint was sent."""
        return {key.split("/")[3] for key in self.uploads if "/checkpoints/step-" in key}


# Waits in the last step until the launcher has looked for new checkpoints, twice.
PATIENT = ENTRY.replace("    (job.output", "    time.sleep(2.5)\n    (job.output", 1)


def test_the_last_checkpoint_of_a_job_that_finishes_is_not_sent(toys, tmp_path):
    context = context_at(toys, tmp_path / "a", tmp_path / "shared")
    store: Any = Recorded(context.store)
    stage = toys.stage("train", source=PATIENT.replace("not found", "False"))

    build(stage, replace(context, store=store), {}, force=False)

    assert "step-0000003" not in store.steps()


def test_the_last_checkpoint_of_a_job_that_fails_after_it_is_sent(toys, tmp_path):
    context = context_at(toys, tmp_path / "a", tmp_path / "shared")
    store: Any = Recorded(context.store)
    stage = toys.stage("train", source=ENTRY.replace("if step == 2 and", "if step == 3 and"))

    with pytest.raises(JobFailed):
        build(stage, replace(context, store=store), {}, force=False)

    assert "step-0000003" in store.steps()


def test_an_asked_for_rebuild_begins_at_the_beginning(toys, tmp_path):
    stage = toys.stage("train", source=ENTRY)
    context = context_at(toys, tmp_path / "a", tmp_path / "shared")
    with pytest.raises(JobFailed):
        build(stage, context, {}, force=False)
    fingerprint = next(iter(context.store.list("train/"))).key.split("/")[1]
    assert checkpoints.find_steps(context.store, ArtifactRef("train", fingerprint)) == (2, 3)
    with pytest.raises(JobFailed):  # it began at 0 again: it fails again
        build(stage, context, {}, force=True)


# Saves step 1, and fails at once after it; resumed, it fails at the next step, and finishes from 3.
FAILING = ENTRY.replace("if step == 2 and not found", "if step < 3")


def start_of(toys: Any, home: str) -> int:
    """The step at which the last execution in a home began."""
    found = (toys.home.parent / home).glob("work/train/*/events.jsonl")
    events = max(found, key=lambda path: path.stat().st_mtime_ns)
    logged = [json.loads(line) for line in events.read_text().splitlines()]
    return [event["step"] for event in logged if event["kind"] == "start"][-1]


def test_a_rebuild_resumes_nothing_that_is_older_on_any_machine(toys, tmp_path):
    stage = toys.stage("train", source=FAILING)
    one, two = (context_at(toys, tmp_path / name, tmp_path / "shared") for name in ("one", "two"))

    def start(context: BuildContext, *, run: str = "run", force: bool = True) -> int:
        with pytest.raises(JobFailed):
            build(stage, replace(context, run_id=run), {}, force=force)
        return start_of(toys, context.placement.home.name)

    assert start(two, run="before", force=False) == 0  # leaves step 1 in its home and in the store
    assert start(one) == 0
    checkpoints.forget(two.store, identity_in(two, stage).ref)  # `one` vanishes with what it saved
    assert start(two) == 0  # not from step 1 of before
    assert start(two) == 1  # from what the rebuild saved
    assert str(resume_of(one, stage)) == "step 2/3, from the store"
    built = build(stage, one, {}, force=False)  # a run that does not ask for it resumes it too
    assert result_of(one, built.manifest, tmp_path / "cache") == "began at 2"


def test_a_checkpoint_that_an_older_job_sends_late_is_not_resumed(toys, tmp_path):
    stage = toys.stage("train", source=FAILING)
    one, two = (context_at(toys, tmp_path / name, tmp_path / "shared") for name in ("one", "two"))
    with pytest.raises(JobFailed):
        build(stage, one, {}, force=False)
    kept = {e.key: one.store.get(e.key) for e in one.store.list("train/") if "/step-" in e.key}
    raise_redo(
        two.store, identity_in(two, stage).ref, RedoCounter(), RedoCounter(number=1, runs=("run",))
    )
    for key, data in kept.items():
        one.store.put(key, data)

    assert resume_of(two, stage) is None
    with pytest.raises(JobFailed):
        build(stage, replace(two, run_id="run"), {}, force=True)

    assert start_of(toys, "two") == 0


def identity_in(context: BuildContext, stage: Any) -> Identity:
    """The artifact that is wanted."""
    recipe = identify(stage, context.run, {}, code=Code(context.root))
    redo = find_redo(context.store, recipe.ref)
    return recipe.redone(redo.number)


def resume_of(context: BuildContext, stage: Any) -> Any:
    """What `nanochat plan` says."""
    return find_resume(context.store, context.work, identity_in(context, stage))
