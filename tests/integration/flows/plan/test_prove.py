"""Old and new code run the same job: what is found equal, what is found to differ, what is refused.

The stages are toys in a repository of their own: real commits, real worker processes.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from flows.identity.fingerprint import Code, Identity, identify
from flows.identity.manifest import Manifest
from flows.plan.accept import Offer
from flows.plan.prove import Proof, prove
from flows.profiles import open_profile
from flows.stages import Stage
from infra.launch.torchrun import StageInterrupted
from nanochat_core.errors import ArtifactError
from nanochat_core.runtime.progress import last_by_step, read_events
from tests.support.flows.fixtures import Toys
from tests.support.flows.repository import commit_all, git
from tests.support.flows.shelf import make_manifest
from tests.support.small_job import small_job

RUN = open_profile("tiny").run

# Runs for a quarter of an hour unless it is stopped.
TRAINS = """
import time

from nanochat_core.runtime.progress import Progress

RATE = 0.7


def run(job):
    progress = Progress(job.events)
    progress.start(1000)
    progress.eval(0, val_loss=1.0)
    loss = 1.0 + job.config["seed"]
    for step in range(1, 1001):
        loss = loss * RATE + 0.1
        progress.step(step, loss=loss, tokens_per_second=time.time(), seconds=time.time())
        time.sleep(0.03 if step < 20 else 1)
    return {}
"""
REFACTORED = (
    TRAINS.replace("RATE", "SPEED").replace("loss = loss * SPEED + 0.1", "loss = follow(loss)")
    + """

def follow(loss):
    return loss * SPEED + 0.1
"""
)
# Multiplies the third loss by 1 + 2**-52: its last bit is another.
LAST_BIT = TRAINS.replace(
    "        progress.step", "        loss *= 1 + 2**-52 if step == 3 else 1\n        progress.step"
)

MAKES_FILES = """
from nanochat_core.runtime.progress import Progress

WORDS = ("one", "two")


def run(job):
    progress = Progress(job.events)
    progress.start(10)
    for step in range(1, 11):
        progress.step(step, score=0.0)
    (job.output / "part").mkdir(exist_ok=True)
    (job.output / "part" / "words.txt").write_text(" ".join(WORDS))
    (job.output / "count.txt").write_text("2")
    return {}
"""


@dataclasses.dataclass
class Bench:
    """A toy stage with an artifact that was built from a commit."""

    toys: Toys
    stage: Stage
    manifest: Manifest
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.toys.root

    @property
    def source(self) -> Path:
        return self.root / "tasks" / f"toy_{self.stage.name}.py"

    def identity(self) -> Identity:
        return identify(self.stage, RUN, {}, code=Code(self.root))

    def prove(self, *, steps: int = 4, processes: int = 1, commits: bool = True) -> Proof:
        """Prove today's source, once it is committed."""
        if commits:
            commit_all(self.root)
        job = small_job(
            self.toys.home / f"prove-{len(self.said)}",
            stage=self.stage.name,
            entry=self.stage.entry,
            config={"seed": RUN.seed},
        )
        return prove(
            offer(self.stage, self.identity(), self.manifest),
            job,
            processes=processes,
            steps=steps,
            root=self.root,
            log=self.said.append,
        )


def offer(stage: Stage, identity: Identity, manifest: Manifest) -> Offer:
    """The offer of an artifact without inputs."""
    return Offer(stage=stage, identity=identity, manifest=manifest, inputs={}, what_changed="")


def make_bench(
    toys: Toys, source: str, *, trains: bool, commit: str | None = "HEAD", dirty: str | None = None
) -> Bench:
    """`dirty` is what the artifact was really built from, `commit` what its manifest says."""
    stage = toys.stage("toy", source=source)
    stage = dataclasses.replace(stage, config=("seed", *(["optimizer"] if trains else [])))
    head = commit_all(toys.root)
    if dirty is not None:
        toys.stage("toy", source=dirty)
    identity = identify(stage, RUN, {}, code=Code(toys.root))
    manifest = dataclasses.replace(
        make_manifest("toy", git_commit=head if commit == "HEAD" else commit),
        fingerprint=identity.fingerprint,
        preimage=identity.preimage,
    )
    return Bench(toys, stage, manifest)


# What is compared.


def test_a_refactor_that_computes_the_same_is_proven_by_its_losses(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    old = git(bench.root, "rev-parse", "HEAD")
    bench.source.write_text(REFACTORED)
    commit_all(bench.root)
    before = git(bench.root, "worktree", "list"), git(bench.root, "status")
    proof = bench.prove(steps=4, commits=False)
    assert (git(bench.root, "worktree", "list"), git(bench.root, "status")) == before
    # A loss of each step and one evaluation. No speeds, and no state: these toys save none.
    assert proof.compared == 5
    assert (proof.old_commit, proof.new_commit) == (old, git(bench.root, "rev-parse", "HEAD"))
    assert proof.device == "cpu"
    assert len(proof.digest) == 64
    events = bench.toys.home / "prove-0" / "old" / "events.jsonl"
    assert len(last_by_step(read_events(events), "step")) == 4  # it was stopped there
    assert bench.said == ["old code: up to 4 steps", "new code: up to 4 steps"]
    (bench.root / "notes.txt").write_text("not code")
    assert bench.prove(steps=4).digest == proof.digest
    assert bench.prove(steps=3).digest != proof.digest


SAVES = """
import json

from nanochat_core.runtime.interrupt import STOP
from nanochat_core.runtime.progress import Progress

WEIGHT = 1.0


def run(job):
    progress = Progress(job.events)
    progress.start(1000)
    with STOP.deferred() as stop:
        for step in range(1, 1001):
            progress.step(step, loss=0.5)
            if stop.requested:
                directory = job.checkpoints / f"step-{step:07d}"
                directory.mkdir()
                (directory / "tensors").write_text(str(WEIGHT))
                (directory / "COMMIT.json").write_text(json.dumps({"step": step}))
                break
    return {}
"""


BROKEN = "def run(job):\n    raise ValueError('of its own')\n"
LISTED = MAKES_FILES.replace('("one", "two")', '["one", "two"]')


@pytest.mark.parametrize(
    ("old", "new", "trains", "steps", "compared"),
    [
        (SAVES, SAVES + "\nUNUSED = 1\n", True, 3, 4),  # losses and a file
        (MAKES_FILES, LISTED, True, 50, 2),  # files: it ends by itself
        (MAKES_FILES, LISTED, False, 3, 2),
    ],
)
def test_a_job_is_proven_by_what_it_leaves(toys, old, new, trains, steps, compared):
    bench = make_bench(toys, old, trains=trains)
    bench.source.write_text(new)
    assert bench.prove(steps=steps).compared == compared


@pytest.mark.parametrize(
    ("old", "new", "trains", "steps", "error"),
    [
        # The last bit of a loss.
        (TRAINS, LAST_BIT, True, 4, r"^step 3: loss is (\S+) with the old code, (?!\1)14\.9"),
        # A weight that no loss shows.
        (SAVES, SAVES.replace("1.0", "1.0000000000000002"), True, 3, "^checkpoint tensors is "),
        # The new one has ten steps, and so leaves files.
        (TRAINS, MAKES_FILES, True, 12, r"eval 0: val_loss is 1\.0 .*, missing with the new"),
        # The scores over the first steps are equal, by chance.
        (
            *(MAKES_FILES, MAKES_FILES.replace("two", "too"), False, 3),
            r"^file part/words\.txt is \w{24} with the old",
        ),
        (
            *("def run(job):\n    return {}\n", "def run(job):\n    return {'a': 1}\n", False, 3),
            "nothing that could be compared",
        ),
        (BROKEN, TRAINS, True, 4, "the old code cannot run the job: .*of its own"),
        (TRAINS, BROKEN, True, 4, "the new code cannot run the job: .*of its own"),
    ],
)
def test_a_difference_refuses_the_proof_and_is_named(toys, old, new, trains, steps, error):
    bench = make_bench(toys, old, trains=trains)
    bench.source.write_text(new)
    with pytest.raises(ArtifactError, match=error) as caught:
        bench.prove(steps=steps)
    assert "--gpus 0" in (caught.value.hint or "") or "--prove" in (caught.value.hint or "")


# The code.


@pytest.mark.parametrize(
    ("made", "commits", "error", "hint"),
    [
        ({"commit": "1" * 40}, True, "git cannot read commit 111111111111", "fetch the commit"),
        *(
            ({"commit": commit}, True, "built outside git", "without --prove")
            for commit in (None, "HEAD~1", "--help", "")
        ),
        (
            *({"dirty": LAST_BIT}, True, r"code of toy/\w+: code tasks\.toy_toy changed"),
            "uncommitted changes, or another version",
        ),
        ({}, False, "HEAD does not hold today's code of toy: code", "commit the changes"),
    ],
)
def test_code_that_its_commit_does_not_hold_is_refused(toys, made, commits, error, hint):
    bench = make_bench(toys, TRAINS, trains=True, **made)
    bench.source.write_text(REFACTORED)
    with pytest.raises(ArtifactError, match=error) as caught:
        bench.prove(commits=commits)
    assert hint in (caught.value.hint or "")
    assert bench.said == []  # nothing was run


def test_a_stage_that_the_old_commit_does_not_have_is_refused(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.rename(bench.source.with_name("toy_new.py"))
    bench.stage = dataclasses.replace(bench.stage, entry="tasks.toy_new")
    with pytest.raises(ArtifactError, match=r"code tasks removed, code tasks\.toy_toy removed"):
        bench.prove()


@pytest.mark.parametrize("lacking", ["no such file", "fatal: not a git repository"])
def test_without_git_or_a_repository_there_is_no_proof(toys, monkeypatch, lacking):
    bench = make_bench(toys, TRAINS, trains=True)
    if lacking == "no such file":
        monkeypatch.setenv("PATH", str(bench.toys.home))
    else:
        os.rename(bench.root / ".git", bench.toys.home / "git")
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(bench.root.parent))
    with pytest.raises(ArtifactError, match=f"git cannot read commit .*: {lacking}") as caught:
        bench.prove(commits=False)
    assert "--prove" in (caught.value.hint or "")


def test_a_job_that_another_process_stops_proves_nothing(toys):
    source = "import os, signal\ndef run(job):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    bench = make_bench(toys, source, trains=True)
    with pytest.raises(StageInterrupted):
        bench.prove()
