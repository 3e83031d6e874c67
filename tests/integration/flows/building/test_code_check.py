"""An artifact is published only if the code that ran is the code that its fingerprint covers."""

import importlib.util
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.publish import find_manifest
from flows.building.build import BuildContext, build, look_up
from flows.building.code_check import CodeChanged
from flows.building.job import make_job
from flows.building.retry import is_retryable
from flows.identity.fingerprint import CARRIERS, REPOSITORY
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.stages import Stage
from infra.launch.torchrun import run_job
from nanochat_core.errors import StageError

SOURCE = """
from pathlib import Path
from tasks import toy_part

def run(job):
    words = Path(__file__).with_name("toy_words.txt").read_text()
    (job.output / "a").write_text(f"{toy_part.NUMBER} {words}")
    return {}
"""
# The record's time is then the one that was seen, as on a disk whose clock is coarse.
LATE = """
import os
import time

def run(job):
    time.sleep(0.5)
    seen = job.code.stat().st_mtime_ns
    from tasks import toy_part

    os.utime(job.code, ns=(seen, seen))
    (job.output / "a").write_text(str(toy_part.NUMBER))
    return {}
"""

COUNT = """
    count = job.checkpoints / "attempts"
    count.write_text((count.read_text() if count.exists() else "") + "x")
"""
WORK = """
def work(item):
    from tasks import toy_part

    return item * toy_part.NUMBER
"""
MANY = """
from nanochat_core.data.processes import map_in_processes
from tasks import toy_work

def run(job):
    (job.output / "a").write_text(str(list(map_in_processes(toy_work.work, [1, 2], processes=2))))
    return {}
"""


@pytest.fixture
def stage(toys: Any) -> Stage:
    """A stage of two modules and a data file."""
    (toys.root / "tasks" / "toy_part.py").write_text("NUMBER = 1\n")
    (toys.root / "tasks" / "toy_words.txt").write_text("one")
    return toys.stage("toy", source=SOURCE)


def editing(toys: Any, edit: Callable[[], None], *, strict: bool = False) -> BuildContext:
    """A context where `edit` happens once, between the fingerprint and the worker's start."""
    context = toys.context(strict=strict)
    edits = [edit]

    def watch(stage: str, event: dict[str, Any]) -> None:
        context.watch(stage, event)
        if event["kind"] == "building" and edits:
            edits.pop()()

    return replace(context, watch=watch)


def text_of(context: BuildContext, manifest: Manifest) -> str:
    """What the stage wrote."""
    (file,) = manifest.files
    return context.store.get(file.key).decode()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("toy_part.py", "1", "2"),
        ("toy_toy.py", "{words}", "{words}!"),
        ("toy_words.txt", "one", "two"),
    ],
)
def test_an_edit_between_fingerprint_and_start_is_not_published(
    toys, stage, name, old, new, strict
):
    path = toys.root / "tasks" / name
    before = look_up(stage, toys.context(), {}, force=False).identity
    context = editing(
        toys, lambda: path.write_text(path.read_text().replace(old, new)), strict=strict
    )

    with pytest.raises(CodeChanged, match=rf"ran other code .*{name.split('.')[0]}") as caught:
        build(stage, context, {}, force=False)

    assert is_retryable(caught.value)  # it is tried again
    assert find_manifest(context.store, ArtifactRef("toy", before.fingerprint)) is None
    assert not (context.work / "toy" / before.fingerprint).exists()
    assert not build(stage, context, {}, force=False).cached  # under the new fingerprint
    assert build(stage, context, {}, force=False).cached


def test_a_module_that_is_imported_late_is_checked_before_the_artifact_exists(toys):
    path = toys.root / "tasks" / "toy_part.py"
    path.write_text("NUMBER = 1\n")
    late = toys.stage("late", source=LATE)
    context = editing(toys, lambda: path.write_text("NUMBER = 2\n"))
    with pytest.raises(CodeChanged, match=r"tasks\.toy_part"):
        build(late, context, {}, force=False)


def test_a_data_file_that_the_fingerprint_does_not_see_is_an_error_though_not_strict(toys, stage):
    (toys.root / "tasks" / "toy_hidden.txt").write_text("one")
    hidden = toys.stage(
        "hidden", source=SOURCE.replace('"toy_words.txt"', '"toy_hid" "den.tx" + "t"')
    )

    with pytest.raises(StageError, match=r"does not see: tasks/toy_hidden\.txt") as caught:
        build(hidden, toys.context(strict=False), {}, force=False)

    assert not is_retryable(caught.value)


def test_stale_bytecode_does_not_run(toys, stage):
    """It has the time and the size of another source, as an edit within a second leaves it."""
    path = toys.root / "tasks" / "toy_part.py"
    path.write_text("NUMBER = 2\n")
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert Path(importlib.util.cache_from_source(str(path))).exists()
    stat = path.stat()
    path.write_text("NUMBER = 1\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    context = toys.context()
    assert text_of(context, build(stage, context, {}, force=False).manifest) == "1 one"


@pytest.mark.parametrize(
    ("earlier", "now", "attempts"),
    [
        (["NUMBER = 2\n"], "NUMBER = 1\n", 1),
        (
            ["NUMBER = 1\n", "# One.\nNUMBER = 1\n", "# Another.\nNUMBER = 1\n"],
            "NUMBER = 1  # a third\n",
            4,
        ),
    ],
)
def test_what_earlier_attempts_saved_is_used_if_their_code_was_the_same(
    toys, stage, earlier, now, attempts
):
    """Each was killed, with its launcher, before anything was checked."""
    source = SOURCE.replace("def run(job):\n", "def run(job):\n" + COUNT)
    source = source.replace("{}\n", '{"attempts": len(count.read_text())}\n')
    stage = toys.stage("toy", source=source)
    context = toys.context()
    identity = look_up(stage, context, {}, force=False).identity
    job = make_job(stage, context, identity, {})
    path = toys.root / "tasks" / "toy_part.py"
    for text in earlier:
        path.write_text(text)
        run_job(job, processes=1, on_event=lambda event: None, root=toys.root)
        (job.directory / "result.json").unlink()
    path.write_text(now)

    built = build(stage, context, {}, force=False)

    assert text_of(context, built.manifest) == "1 one"
    assert built.manifest.provenance.metrics == {"attempts": attempts}
    assert ("warning" in toys.kinds("toy")) == (attempts == 1)


def test_a_process_that_the_stage_starts_records_what_it_loads(toys):
    (toys.root / "tasks" / "toy_part.py").write_text("NUMBER = 1\n")
    (toys.root / "tasks" / "toy_work.py").write_text(WORK)
    many = toys.stage("many", source=MANY)
    path = toys.root / "tasks" / "toy_part.py"
    assert not build(many, toys.context(strict=False), {}, force=False).cached

    path.write_text("NUMBER = 3\n")
    with pytest.raises(CodeChanged, match=r"tasks\.toy_part"):
        build(many, editing(toys, lambda: path.write_text("NUMBER = 2\n")), {}, force=False)


def test_a_job_that_records_nothing_is_not_published(toys, stage):
    """As a worker of another version would."""
    source = SOURCE.replace("return {}", "import shutil; shutil.rmtree(job.code); return {}")
    with pytest.raises(StageError, match="toy did not record the code that it ran"):
        build(toys.stage("toy", source=source), toys.context(), {}, force=False)


def test_the_worker_loads_nothing_that_a_fingerprint_covers_before_it_records():
    """What is loaded before is not compiled from the source that is recorded."""
    script = (
        "import sys, nanochat_core.worker; print(*(n for n in sys.modules if n[:8] == 'nanochat'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    early = set(done.stdout.split())
    packages = {name.rpartition(".")[0] for name in early}
    assert "nanochat_core.worker" in early
    assert early - packages <= CARRIERS
