"""A job that finished is published, not run again, when the store refused its output."""

from pathlib import Path
from typing import Any

import pytest

from flows.building.build import build
from flows.stages import Stage
from nanochat_core.errors import StageError, StoreError

# Counts its executions in a file next to the home.
COUNTED = """
def run(job):
    with (job.directory.parents[3] / "executions").open("a") as file:
        file.write(".")
    (job.output / "value.txt").write_text("made")
    return {"length": 4}
"""


def executions(toys: Any) -> int:
    return len((toys.home.parent / "executions").read_text())


def build_refused(stage: Stage, context: Any) -> None:
    """Run the stage's job for a store that refuses uploads."""

    def refuse(key: str, path: Path, **options: Any) -> None:
        raise StoreError("the store refuses")

    context.store.upload = refuse
    with pytest.raises(StoreError, match="the store refuses"):
        build(stage, context, {}, force=False)


@pytest.fixture
def refused(toys: Any) -> Stage:
    """Return a stage whose job has finished and whose artifact was refused."""
    stage = toys.stage("first", source=COUNTED)
    build_refused(stage, toys.context())
    assert executions(toys) == 1
    return stage


def test_a_refused_upload_does_not_repeat_a_finished_job(toys, refused):
    manifest = build(refused, toys.context(), {}, force=False).manifest

    assert executions(toys) == 1
    assert toys.context().store.get(manifest.files[0].key) == b"made"
    assert manifest.provenance.metrics == {"length": 4}
    assert len(manifest.provenance.segments) == 1


def change_output(job: Path) -> None:
    (job / "output" / "value.txt").write_text("half")


def add_output(job: Path) -> None:
    (job / "output" / "another").touch()


def change_job(job: Path) -> None:
    text = (job / "job.json").read_text()
    (job / "job.json").write_text(text.replace('"threads": 1', '"threads": 2'))


@pytest.mark.parametrize("change", [change_output, add_output, change_job])
def test_a_finished_job_that_is_not_as_it_was_runs_again(toys, refused, change):
    (job,) = toys.home.glob("work/first/*/job.json")
    change(job.parent)

    build(refused, toys.context(), {}, force=False)

    assert executions(toys) == 2


def test_code_that_the_fingerprint_does_not_see_is_found_in_what_an_earlier_attempt_ran(toys):
    (toys.root / "tasks" / "hidden.py").write_text("VALUE = 1\n")
    source = COUNTED.replace(
        "def run(job):", "def run(job):\n    __import__('importlib').import_module('tasks.hidden')"
    )
    stage = toys.stage("first", source=source)
    build_refused(stage, toys.context(strict=False))

    with pytest.raises(StageError, match=r"does not see: tasks\.hidden"):
        build(stage, toys.context(), {}, force=False)

    assert executions(toys) == 1
