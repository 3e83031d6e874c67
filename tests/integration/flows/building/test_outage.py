"""A store that does not answer for many leases' time costs a stage nothing but the wait."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from flows.building.build import BuildContext, build
from infra.launch.torchrun import StageInterrupted
from infra.storage.open import open_store
from tests.support.flows.fixtures import SAVE
from tests.support.flows.outage import TERMS, Outage
from tests.support.flows.waiting import wait_until

# Ends when there is a file `go` next to the homes. Notes every step in another file there.
TRAIN = (
    SAVE
    + """
def run(job):
    progress = Progress(job.events)
    found = sorted(job.checkpoints.glob("step-*"))
    start = int(found[-1].name.removeprefix("step-")) if found else 0
    progress.start(8, step=start)
    for step in range(start + 1, 9):
        while step == 8 and not (job.directory.parents[3] / "go").exists():
            time.sleep(0.02)
        progress.step(step)
        with (job.directory.parents[3] / "steps").open("a") as file:
            file.write(f"{step}\\n")
        save(job, step, 8)
    values = [(path / "value.txt").read_text() for path in job.inputs.values()]
    (job.output / "value.txt").write_text("+".join([*values, "trained"]))
    return {}
"""
)


def context_of(toys: Any, home: str = "home", **store: Any) -> BuildContext:
    """A machine whose checkpoints go to a store that it shares."""
    directory = toys.home.parent / home
    directory.mkdir(exist_ok=True)
    shared = (toys.home.parent / "shared").as_uri()
    placement = replace(toys.placement, home=directory, store=shared)
    return replace(toys.context(), placement=placement, store=open_store(shared), terms=TERMS)


def steps_done(toys: Any) -> list[int]:
    return [int(line) for line in (toys.home.parent / "steps").read_text().split()]


OUTAGES = [
    ("get_stored", "train/"),  # looking for the artifact
    ("get_stored", "lease.json"),  # acquiring the lease
    ("list", "checkpoints/"),  # looking for a checkpoint to resume from
    ("fetch", "first/"),  # an input
    ("upload", "checkpoints/"),  # in training: a checkpoint
    ("put_if_same", "lease.json"),  # in training: a heartbeat
    ("upload", "/files/"),  # publishing
    ("upload", "/logs/"),
    ("put_if_absent", "manifest.json"),
    ("put", "index/train"),
    ("delete", "checkpoints/"),
]
IN_TRAINING = (4, 5)


def test_no_step_is_lost_or_repeated_whenever_the_store_falls_silent(toys):
    """One outage after the other, each in another request of the same build."""
    context = context_of(toys)
    first = toys.stage("first")
    stage = toys.stage("train", first, source=TRAIN)
    made = build(first, context, {}, force=False).manifest
    outages: list[Any] = []
    for verb, part in OUTAGES:
        outages.append(Outage(outages[-1] if outages else context.store, verb, part))
    toys.events.clear()

    def train_until_over() -> None:
        wait_until(lambda: all(is_over(outages[number]) for number in IN_TRAINING))
        wait_until(lambda: any("/COMMIT" in e.key for e in context.store.list("train/")))
        (toys.home.parent / "go").touch()

    training = threading.Thread(target=train_until_over)
    training.start()
    built = build(stage, replace(context, store=outages[-1]), {"first": made}, force=False)
    training.join()

    assert [
        item for item, outage in zip(OUTAGES, outages, strict=True) if not is_over(outage)
    ] == []
    assert steps_done(toys) == list(range(1, 9))
    assert context.store.get(built.manifest.files[0].key) == b"first+trained"
    assert not list(context.store.list(f"train/{built.manifest.fingerprint}/checkpoints/"))
    said = "\n".join(event["text"] for _, event in toys.events if event["kind"] == "waiting")
    for number, (verb, _) in enumerate(OUTAGES):
        assert f"(no answer to {verb})" in said or number in IN_TRAINING


def is_over(outage: Any) -> bool:
    """Whether it came, and went by."""
    return outage.until is not None and time.monotonic() > outage.until


def test_a_run_that_is_stopped_does_not_wait_and_what_it_made_is_published_later(toys):
    (toys.home.parent / "go").touch()
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
