"""Prove that two commits compute the same: run one job with both and compare what it leaves.

A stage that trains stops after a few steps. It leaves the values that it logged, and a checkpoint:
a difference in one weight may be too small to show in the next loss. Any other stage leaves its
output files: an accuracy over a few examples may be equal by chance.

The old commit is the one that the artifact was built from, the new one is HEAD. Both run with
today's packages, on this machine.
"""

import importlib.metadata
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, cast

from flows.identity.diff import compare
from flows.identity.fingerprint import Code, code_of, fingerprint_of
from flows.identity.ref import short
from flows.plan.accept import Offer, code_that_made
from flows.render.text import listed
from infra.launch.torchrun import JobFailed, StageInterrupted, run_job
from nanochat_core.errors import ArtifactError, StageError, reason_of
from nanochat_core.job import Job, digests_of
from nanochat_core.runtime.progress import read_events
from nanochat_core.section import Tree

STEPS = 5
# Measured by a clock: they differ between any two runs. So does the time in COMMIT.json.
_SPEEDS = frozenset({"dollars", "mfu", "seconds", "tokens_per_second"})
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOWN_CHANGES = 3
_SHOWN_TEXT = 24  # characters: all of a number, the beginning of a digest
_INSTEAD = "run the stage again, or accept it without --prove"

Results: TypeAlias = dict[str, str]  # name of a file or a value -> its digest or its JSON


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A record of what was compared and found equal."""

    compared: int  # values and files
    digest: str  # of these
    old_commit: str
    new_commit: str
    torch: str
    device: str  # "cpu" or "cuda"
    processes: int


def prove(
    offer: Offer,
    job: Job,
    *,
    processes: int,
    steps: int,
    root: Path,
    log: Callable[[str], None],
) -> Proof:
    """Run `job` with the commit that made the offered artifact and with HEAD of `root`.

    Both run below the job's directory. Raises ArtifactError if the results differ, with the first
    value that does, and if the code of either is not in its commit or does not run.
    """
    assert steps > 0, steps
    made_from, name = offer.manifest.provenance.git_commit, offer.manifest.name
    if made_from is None or not _COMMIT.fullmatch(made_from):
        raise ArtifactError(
            f"{name} was built outside git, so its code is not available", hint=_INSTEAD
        )
    # A manifest names a commit even if the work tree was dirty, as it may be now: the commits must
    # hold what was fingerprinted.
    roots = {which: job.directory / f"{which}-code" for which in ("old", "new")}
    old = _export(root, made_from, roots["old"])
    if changes := _changes(offer, roots["old"], code_that_made(offer.manifest)):
        raise ArtifactError(
            f"commit {short(old)} does not hold the code of {name}: {changes}",
            hint="it was built from uncommitted changes, or another version of the code "
            f"fingerprinted it; {_INSTEAD}",
        )
    new = _export(root, "HEAD", roots["new"])
    if changes := _changes(offer, roots["new"], offer.identity.preimage["code"]):
        raise ArtifactError(
            f"HEAD does not hold today's code of {job.stage}: {changes}",
            hint=f"commit the changes; or {_INSTEAD}",
        )
    limit = steps if "optimizer" in offer.stage.config else None  # only training has steps
    found: list[Results] = []
    for which, code in roots.items():
        log(f"{which} code: {f'up to {limit} steps' if limit else 'to the end'}")
        part = replace(job, directory=job.directory / which)
        found.append(_results(part, code, processes=processes, steps=limit, which=which))
    _check_equal(*found)
    return Proof(
        compared=len(found[0]),
        digest=fingerprint_of(dict(found[0])),
        old_commit=old,
        new_commit=new,
        torch=importlib.metadata.version("torch"),
        device=job.resources.device,
        processes=processes,
    )


def _results(job: Job, root: Path, *, processes: int, steps: int | None, which: str) -> Results:
    """Run a job with the code in `root`, up to `steps` steps; return what it computed."""
    try:
        run_job(job, processes=processes, on_event=lambda event: None, root=root, steps=steps)
    except StageInterrupted:
        logged = [event for event in read_events(job.events) if event["kind"] in ("step", "eval")]
        done = [event["step"] for event in logged if event["kind"] == "step"]
        if steps is None or len(done) < steps:
            raise  # another process stopped it
        saved = digests_of(job.checkpoints / f"step-{done[-1]:07d}")
        return {
            f"{event['kind']} {event['step']}: {name}": json.dumps(value)  # equal to the last bit
            for event in logged
            for name, value in event["values"].items()
            if name not in _SPEEDS
        } | {f"checkpoint {path}": d for path, d in saved.items() if path != "COMMIT.json"}
    except StageError as error:
        tail = error.log_tail.splitlines()[-1:] if isinstance(error, JobFailed) else []
        raise ArtifactError(
            f"the {which} code cannot run the job: {error}", hint="; ".join([*tail, _INSTEAD])
        ) from error
    return {f"file {path}": digest for path, digest in digests_of(job.output).items()}


def _check_equal(old: Results, new: Results) -> None:
    """Raise ArtifactError with the first difference, or if there is nothing to compare."""
    # In the old run's order, so that the first difference is the earliest one.
    for name in old | new:
        if old.get(name) != new.get(name):
            before, after = (found.get(name, "missing")[:_SHOWN_TEXT] for found in (old, new))
            raise ArtifactError(
                f"{name} is {before} with the old code, {after} with the new",
                hint="the change decides results: run the stage. If even one code does not repeat "
                "itself on this device, prove it on the CPU with --gpus 0",
            )
    if not new:
        raise ArtifactError("the job made nothing that could be compared", hint=_INSTEAD)


def _changes(offer: Offer, root: Path, code: Tree) -> str:
    """Return how the stage's code in `root` differs from the digests `code`; "" if it does not."""
    found: Mapping[str, str] = {}
    if root.joinpath(*offer.stage.entry.split(".")).with_suffix(".py").is_file():
        config = cast("dict[str, Tree]", offer.identity.preimage["config"])
        found = code_of(offer.stage, config, code=Code(root))
    return listed(compare({"code": code}, {"code": dict(found)}), _SHOWN_CHANGES)


def _export(root: Path, commit: str, directory: Path) -> str:
    """Write the files of a commit to `directory`, and return its full name.

    Not a work tree of git: that is recorded in the repository, where a killed proof leaves it.
    Raises ArtifactError if git does not give the commit.
    """
    try:
        archive = subprocess.run(
            ["git", "-C", str(root), "archive", "--format=tar", commit],
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,  # a prompt would wait for input that nothing shows
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        is_away = isinstance(error, OSError)
        text = reason_of(error) if is_away else error.stderr.decode(errors="replace").strip()
        raise ArtifactError(
            f"git cannot read commit {short(commit)} in {root}: {text}",
            hint=f"install git and fetch the commit; {_INSTEAD}",
        ) from error
    directory.mkdir(parents=True)
    # "data" refuses absolute paths, links that lead outside, and device files.
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
        return tar.pax_headers["comment"]
