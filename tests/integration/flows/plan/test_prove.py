"""Old and new code run the same job: what is found equal, what is found to differ, what is refused.

The stages are toys in a repository of their own: real commits, real worker processes.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest

from flows.artifacts.publish import publish
from flows.identity.fingerprint import Code, Identity, identify
from flows.identity.manifest import Manifest
from flows.plan.accept import Offer
from flows.plan.prove import Proof, prove
from flows.profiles import open_profile
from flows.stages import Stage
from infra.launch.torchrun import StageInterrupted
from infra.storage.open import open_store
from nanochat_core.errors import ArtifactError
from nanochat_core.runtime.progress import last_by_step, read_events
from tests.support.flows.fixtures import Toys
from tests.support.flows.repository import commit_all, git
from tests.support.flows.rows import PROVENANCE
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
    output = toys.home / "output"
    output.mkdir()
    (output / "file").write_text("made before")
    manifest = publish(
        open_store(toys.placement.store),
        identify(stage, RUN, {}, code=Code(toys.root)),
        output,
        logs=[],
        inputs={},
        provenance=dataclasses.replace(PROVENANCE, git_commit=head if commit == "HEAD" else commit),
        check_lease=lambda: None,
    ).manifest
    return Bench(toys, stage, manifest)


# A stage that trains.


def test_a_refactor_that_computes_the_same_is_proven_by_its_losses(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    old = git(bench.root, "rev-parse", "HEAD")
    bench.source.write_text(REFACTORED)
    proof = bench.prove(steps=4)
    # A loss of each step and one evaluation. No speeds, and no state: these toys save none.
    assert proof.compared == 5
    assert (proof.old_commit, proof.new_commit) == (old, git(bench.root, "rev-parse", "HEAD"))
    assert proof.device == "cpu"
    assert len(proof.digest) == 64
    events = bench.toys.home / "prove-0" / "old" / "events.jsonl"
    assert len(last_by_step(read_events(events), "step")) == 4  # it was stopped there
    assert bench.said == ["old code: up to 4 steps", "new code: up to 4 steps"]


def test_equal_proofs_have_equal_digests(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.write_text(REFACTORED)
    commit_all(bench.root)
    (bench.root / "notes.txt").write_text("not code")
    first = bench.prove(steps=2, commits=False)
    assert bench.prove(steps=2).digest == first.digest
    assert bench.prove(steps=3).digest != first.digest


def test_one_bit_of_one_loss_refuses_the_proof_and_is_named(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.write_text(LAST_BIT)
    assert bench.prove(steps=2).compared == 3  # it is in the third
    with pytest.raises(ArtifactError) as caught:
        bench.prove(steps=4)
    message = str(caught.value)
    assert message.startswith("step 3: loss is 14.9")
    assert " with the old code, 14.9" in message
    old, new = message.split()[4], message.split()[9]
    assert old != new
    assert abs(float(old) - float(new)) < 1e-14
    assert "--gpus 0" in (caught.value.hint or "")


def test_a_value_that_is_no_longer_reported_refuses_the_proof(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.write_text(TRAINS.replace("    progress.eval(0, val_loss=1.0)\n", ""))
    with pytest.raises(ArtifactError, match=r"eval 0: val_loss is 1.0 with the old code, missing"):
        bench.prove(steps=2)


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


INTERRUPTS = """
    import os, signal
    (job.directory / "pid").write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGINT)
"""


def test_a_weight_that_no_loss_shows_refuses_the_proof(toys):
    bench = make_bench(toys, SAVES, trains=True)
    bench.source.write_text(SAVES + "\nUNUSED = 1\n")
    proof = bench.prove(steps=3)
    assert proof.compared == 4  # losses and a file
    bench.source.write_text(SAVES.replace("1.0", "1.0000000000000002"))
    with pytest.raises(ArtifactError, match=r"^checkpoint tensors is "):
        bench.prove(steps=3)


# A job that ends.


@pytest.mark.parametrize("trains", [True, False])
def test_a_job_that_ends_by_itself_is_proven_by_its_files(toys, trains):
    bench = make_bench(toys, MAKES_FILES, trains=trains)
    bench.source.write_text(MAKES_FILES.replace('("one", "two")', '["one", "two"]'))
    assert bench.prove(steps=50).compared == 2


def test_files_and_steps_are_not_compared(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.write_text(MAKES_FILES)
    with pytest.raises(ArtifactError, match=r"eval 0: val_loss is 1\.0 .*, missing with the new"):
        bench.prove(steps=12)  # the new one has ten


def test_a_file_that_differs_refuses_the_proof_and_is_named(toys):
    """Its scores over the first steps are equal, by chance."""
    bench = make_bench(toys, MAKES_FILES, trains=False)
    bench.source.write_text(MAKES_FILES.replace("two", "too"))
    with pytest.raises(ArtifactError, match=r"^file part/words\.txt is \w{24} with the old"):
        bench.prove(steps=3)


def test_a_stage_that_makes_nothing_proves_nothing(toys):
    bench = make_bench(toys, "def run(job):\n    return {}\n", trains=False)
    bench.source.write_text("def run(job):\n    return {'a': 1}\n")
    with pytest.raises(ArtifactError, match="nothing that could be compared"):
        bench.prove()


# The code.


def seen(bench: Bench) -> list[str]:
    """What git says of the repository."""
    return [git(bench.root, *words.split()) for words in ("status", "worktree list", "log")]


def test_the_repository_is_left_as_it_is(toys):
    bench = make_bench(toys, MAKES_FILES, trains=False)
    for source in (MAKES_FILES + "\nUNUSED = 1\n", "def run(job):\n    raise ValueError\n"):
        bench.source.write_text(source)
        commit_all(bench.root)
        before = seen(bench)
        with contextlib.nullcontext() if "UNUSED" in source else pytest.raises(ArtifactError):
            bench.prove(commits=False)
        assert seen(bench) == before


def test_a_commit_that_is_not_here_is_refused(toys):
    bench = make_bench(toys, TRAINS, trains=True, commit="1" * 40)
    with pytest.raises(ArtifactError, match="git cannot read commit 111111111111") as caught:
        bench.prove()
    assert "fetch the commit" in (caught.value.hint or "")


@pytest.mark.parametrize("commit", [None, "HEAD~1", "--help", ""])
def test_an_artifact_without_a_commit_is_refused(toys, commit):
    bench = make_bench(toys, TRAINS, trains=True, commit=commit)
    with pytest.raises(ArtifactError, match="built outside git"):
        bench.prove()


def test_an_artifact_of_code_that_its_commit_does_not_hold_is_refused(toys):
    bench = make_bench(toys, TRAINS, trains=True, dirty=LAST_BIT)
    bench.source.write_text(REFACTORED)
    changed = r"code of toy/\w+: code tasks\.toy_toy changed"
    with pytest.raises(ArtifactError, match=changed) as caught:
        bench.prove()
    assert "uncommitted changes, or another version" in (caught.value.hint or "")
    assert bench.said == []  # nothing was run


def test_a_stage_that_the_old_commit_does_not_have_is_refused(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.rename(bench.source.with_name("toy_new.py"))
    bench.stage = dataclasses.replace(bench.stage, entry="tasks.toy_new")
    with pytest.raises(ArtifactError, match=r"code tasks removed, code tasks\.toy_toy removed"):
        bench.prove()


def test_code_that_is_not_committed_is_refused(toys):
    bench = make_bench(toys, TRAINS, trains=True)
    bench.source.write_text(REFACTORED)
    with pytest.raises(
        ArtifactError, match="HEAD does not hold today's code of toy: code"
    ) as caught:
        bench.prove(commits=False)
    assert "commit the changes" in (caught.value.hint or "")
    assert bench.said == []  # nothing was run


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


@pytest.mark.parametrize("which", ["old", "new"])
def test_code_that_fails_is_named_with_its_error(toys, which):
    broken = "def run(job):\n    raise ValueError('of its own')\n"
    sources = (broken, TRAINS) if which == "old" else (TRAINS, broken)
    bench = make_bench(toys, sources[0], trains=True)
    bench.source.write_text(sources[1])
    with pytest.raises(ArtifactError, match=f"the {which} code cannot run .*of its own") as caught:
        bench.prove()
    assert "--prove" in (caught.value.hint or "")


def test_who_interrupts_a_proof_ends_it(toys):
    """Ctrl-C comes while the old code runs: its worker ends, and git knows of nothing."""
    bench = make_bench(toys, TRAINS.replace("    for", INTERRUPTS + "    for"), trains=True)
    before = seen(bench)
    with pytest.raises(KeyboardInterrupt):
        bench.prove(commits=False)
    assert seen(bench) == before
    worker = int((bench.toys.home / "prove-0" / "old" / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_job_that_another_process_stops_proves_nothing(toys):
    source = "import os, signal\ndef run(job):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    bench = make_bench(toys, source, trains=True)
    with pytest.raises(StageInterrupted):
        bench.prove()
