"""A store that does not answer for many leases' time costs a stage nothing but the wait."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.publish import find_manifest
from flows.build.build import BuildContext, build
from flows.identity.fingerprint import Code, identify
from flows.identity.ref import ArtifactRef
from flows.leases.lease import LeaseLost, try_acquire
from infra.launch.torchrun import StageInterrupted
from infra.storage.open import open_store
from tests.support.flows.claims import claim
from tests.support.flows.outage import TERMS, Outage
from tests.support.flows.waiting import wait_until

# Takes longer than the outage. Notes every step that it does in a file beside the homes.
TRAIN = """
import hashlib
import json
import time

from nanochat_core.runtime.progress import Progress


def save(job, step):
    directory = job.checkpoints / f"step-{step:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    data = f"state after {step}".encode()
    (directory / "tensors.safetensors").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    commit = {"format": 1, "step": step, "total": 8, "files": {"tensors.safetensors": entry}}
    (directory / "COMMIT.json").write_text(json.dumps({**commit, "state": {}}))


def run(job):
    progress = Progress(job.events)
    found = sorted(job.checkpoints.glob("step-*"))
    start = int(found[-1].name.removeprefix("step-")) if found else 0
    progress.start(8, step=start)
    for step in range(start + 1, 9):
        time.sleep(0.3)
        progress.step(step)
        with (job.directory.parents[3] / "steps").open("a") as file:
            file.write(f"{step}\\n")
        save(job, step)
    values = [(path / "value.txt").read_text() for path in job.inputs.values()]
    (job.output / "value.txt").write_text("+".join([*values, "trained"]))
    return {}
"""


def context_of(toys: Any, home: str = "home", **store: Any) -> BuildContext:
    """A machine whose checkpoints go to a store that it shares."""
    directory = toys.home.parent / home
    directory.mkdir(exist_ok=True)
    shared = (toys.home.parent / "shared").as_uri()
    placement = replace(toys.placement, home=directory, store=shared)
    return replace(toys.context(), placement=placement, store=open_store(shared), terms=TERMS)


def steps_done(toys: Any) -> list[int]:
    return [int(line) for line in (toys.home.parent / "steps").read_text().split()]


@pytest.mark.parametrize(
    ("verb", "part", "must_wait"),
    [
        ("get", "train/", True),  # looking for the artifact
        ("get_stored", "lease.json", True),  # acquiring the lease
        ("list", "checkpoints/", True),  # looking for a checkpoint to resume from
        ("fetch", "first/", True),  # an input
        ("put_if_same", "lease.json", False),  # in training: a heartbeat
        ("upload", "checkpoints/", False),  # in training: a checkpoint
        ("upload", "/files/", True),  # publishing
        ("upload", "/logs/", True),
        ("get_stored", "manifest.json", True),
        ("put_if_absent", "manifest.json", True),
        ("put", "index/train", True),
        ("delete", "checkpoints/", True),
    ],
)
def test_no_step_is_lost_or_repeated_whenever_the_store_falls_silent(
    toys: Any, verb: str, part: str, must_wait: bool
) -> None:
    context = context_of(toys)
    first = toys.stage("first")
    stage = toys.stage("train", first, source=TRAIN)
    made = build(first, context, {}, force=False).manifest
    outage: Any = Outage(context.store, verb, part)

    built = build(stage, replace(context, store=outage), {"first": made}, force=False)

    assert outage.until is not None
    assert time.monotonic() > outage.until
    assert steps_done(toys) == list(range(1, 9))
    assert context.store.get(built.manifest.files[0].key) == b"first+trained"
    assert not list(context.store.list(f"train/{built.manifest.fingerprint}/checkpoints/"))
    said = [event["text"] for _, event in toys.told if event["kind"] == "waiting"]
    assert any("store not reached for" in text for text in said) or not must_wait


def test_a_run_that_is_stopped_does_not_wait_and_what_it_made_is_published_later(
    toys: Any,
) -> None:
    stage = toys.stage("train", source=TRAIN)
    context = context_of(toys)
    outage: Any = Outage(context.store, "upload", "/files/", seconds=3600)
    away = replace(context, store=outage)
    threading.Thread(
        target=lambda: (wait_until(lambda: outage.until is not None), away.stop.set())
    ).start()
    with pytest.raises(StageInterrupted, match="stopped while it waited for file:"):
        build(stage, away, {}, force=False)

    build(stage, context_of(toys), {}, force=False)

    assert steps_done(toys) == list(range(1, 9))


def test_another_owner_ends_the_wait_to_publish(toys: Any) -> None:
    stage = toys.stage("train", source=TRAIN)
    context = context_of(toys)
    fingerprint = identify(stage, context.run, {}, code=Code(context.root)).fingerprint
    outage: Any = Outage(context.store, "upload", "/files/")

    def take_over() -> None:
        wait_until(lambda: outage.until is not None)
        other = claim("b", home="elsewhere")
        try_acquire(context.store, ArtifactRef("train", fingerprint), other, ttl=-1.0)

    other = threading.Thread(target=take_over)
    other.start()
    with pytest.raises(LeaseLost, match="to run run-b"):
        build(stage, replace(context, store=outage), {}, force=False)
    other.join()

    assert find_manifest(context.store, ArtifactRef("train", fingerprint)) is None
    assert list(Path(context.work).glob("train/*/output/value.txt"))
