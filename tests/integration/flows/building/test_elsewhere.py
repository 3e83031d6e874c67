"""An unfinished job resumes in another home, from the checkpoints in the store they share."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.building.build import BuildContext, build
from flows.building.code_check import CodeChanged
from flows.identity.fingerprint import Code, identify
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


# Waits in the last step until the launcher has looked for new checkpoints, twice.
PATIENT = ENTRY.replace("    (job.output", "    time.sleep(2.5)\n    (job.output", 1)
PATIENT = PATIENT.replace("not found", "False")


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_checkpoint_is_sent_only_if_the_job_fails_after_it(
    toys, tmp_path, monkeypatch, fails
):
    context = context_at(toys, tmp_path / "a", tmp_path / "shared")
    upload, uploaded = context.store.upload, []

    def note(key: str, path: Path, **options: Any) -> None:
        uploaded.append(key)
        upload(key, path, **options)

    monkeypatch.setattr(context.store, "upload", note)
    failing = ENTRY.replace("if step == 2 and not found", "if step == 3")
    stage = toys.stage("train", source=failing if fails else PATIENT)

    with pytest.raises(JobFailed) if fails else contextlib.nullcontext():
        build(stage, context, {}, force=False)

    assert any("/checkpoints/step-0000003" in key for key in uploaded) == fails


def test_a_checkpoint_of_code_that_was_edited_meanwhile_is_not_sent(toys, tmp_path):
    part = toys.root / "tasks" / "toy_part.py"
    part.write_text("NUMBER = 1\n")
    stage = toys.stage("train", source=f"from tasks import toy_part\n{ENTRY}")
    context = context_at(toys, tmp_path / "a", tmp_path / "shared")

    def edit(stage: str, event: Any) -> None:
        if event["kind"] == "building":
            part.write_text("NUMBER = 2\n")

    with pytest.raises((CodeChanged, JobFailed)):
        build(stage, replace(context, watch=edit), {}, force=False)
    assert not [entry for entry in context.store.list("train/") if "/checkpoints/" in entry.key]
