"""Prove that old and new code compute the same: run one job with both and compare the results.

A stage that trains stops after a few steps. The values that it logged are compared bit by bit, then
the state that it saved: a difference in one weight may be too small to show in the next loss. The
output files of a job that ends before are compared: an accuracy over a few examples may be equal by
chance.

The old code is the commit that the artifact was built from, the new code is the work tree. Both run
with today's packages, on this machine.
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
# Measured by a clock: they differ between any two runs.
_SPEEDS = frozenset({"dollars", "mfu", "seconds", "tokens_per_second"})
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHOWN_CHANGES = 3
_SHOWN_TEXT = 24  # characters: all of a number, the beginning of a digest
_FILE = "file "
_STATE = "state after the last step: "
_INSTEAD = "run the stage again, or accept it without --prove"

Results: TypeAlias = dict[str, str]  # name of a file or a value -> its digest or its JSON


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A record of what was compared and found equal."""

    compared: str  # "5 steps, 14 values, weights and optimizer too", or "3 files"
    digest: str  # of these
    old_commit: str
    new_commit: str | None  # None: today's code has uncommitted changes
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
    """Run `job` with the code that made the offered artifact and with today's, in `root`.

    Both run below the job's directory. Raises ArtifactError if the results differ, with the first
    value that does, and if the old code is not available or does not run.
    """
    assert steps > 0, steps
    old_root, head_root = job.directory / "code", job.directory / "head"
    commit, name = offer.manifest.provenance.git_commit, offer.manifest.name
    if commit is None or not _COMMIT.fullmatch(commit):
        raise ArtifactError(
            f"{name} was built outside git, so its code is not available", hint=_INSTEAD
        )
    _export(root, commit, old_root)
    # A manifest names a commit even if the work tree was dirty: compare the digests that it was
    # fingerprinted with.
    if changes := _changes(offer, old_root, code_that_made(offer.manifest)):
        raise ArtifactError(
            f"commit {short(commit)} does not hold the code of {name}: {changes}",
            hint="it was built from uncommitted changes, or another version of the code "
            f"fingerprinted it; {_INSTEAD}",
        )
    limit = steps if "optimizer" in offer.stage.config else None  # only training has steps
    found: list[Results] = []
    for which, code in (("old", old_root), ("new", root)):
        log(f"{which} code: {f'up to {limit} steps' if limit else 'to the end'}")
        part = replace(job, directory=job.directory / which)
        found.append(_results(part, code, processes=processes, steps=limit, which=which))
    # Both runs took minutes: what ran as the new code may not be what the offer is of.
    new_code = offer.identity.preimage["code"]
    if changes := _changes(offer, root, new_code):
        raise ArtifactError(
            f"{root} was edited while {job.stage} was proven: {changes}",
            hint="run the command again",
        )
    _check_equal(*found)
    head = _export(root, "HEAD", head_root)
    return Proof(
        compared=_describe(found[0], steps),
        digest=fingerprint_of(dict(found[0])),
        old_commit=commit,
        new_commit=None if _changes(offer, head_root, new_code) else head,
        torch=importlib.metadata.version("torch"),
        device=job.resources.device,
        processes=processes,
    )


def _results(job: Job, root: Path, *, processes: int, steps: int | None, which: str) -> Results:
    """Run a job with the code in `root`, up to `steps` steps; return what it computed."""
    try:
        run_job(job, processes=processes, on_event=lambda event: None, root=root, steps=steps)
    except StageInterrupted:
        found: Results = {}
        done: list[int] = []
        for event in read_events(job.events):
            kind, step = event["kind"], event.get("step")
            if kind == "step":
                done.append(event["step"])
            if kind in ("start", "step", "eval"):
                totals = {"of": event["total"]} if "total" in event else {}
                for value, number in {**event.get("values", {}), **totals}.items():
                    if value not in _SPEEDS:  # as JSON: equal to the last bit, and nan equals nan
                        found[f"{kind} {step}: {value}"] = json.dumps(number)
        if steps is None or len(done) < steps:
            raise  # another process stopped it
        saved = digests_of(job.checkpoints / f"step-{done[-1]:07d}")
        # COMMIT.json holds the seconds trained, which differ between any two runs.
        return found | {f"{_STATE}{p}": d for p, d in saved.items() if p != "COMMIT.json"}
    except StageError as error:
        tail = error.log_tail.splitlines()[-1:] if isinstance(error, JobFailed) else []
        raise ArtifactError(
            f"the {which} code cannot run the job: {error}", hint="; ".join([*tail, _INSTEAD])
        ) from error
    return {f"{_FILE}{path}": digest for path, digest in digests_of(job.output).items()}


def _check_equal(old: Results, new: Results) -> None:
    """Raise ArtifactError with the first difference, or if there is nothing to compare."""
    is_whole = [name.startswith(_FILE) for found in (old, new) for name in list(found)[:1]]
    if len(set(is_whole)) > 1:
        raise ArtifactError("only one of the two codes stopped after so few steps", hint=_INSTEAD)
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


def _describe(results: Results, steps: int) -> str:
    """Return how much was compared, for people."""
    if next(iter(results)).startswith(_FILE):
        return f"{len(results)} files"
    state = ", weights and optimizer too" if any(n.startswith(_STATE) for n in results) else ""
    return f"{steps} steps, {len(results)} values{state}"


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
        text = (
            reason_of(error)
            if isinstance(error, OSError)
            else error.stderr.decode(errors="replace")
        )
        raise ArtifactError(
            f"git cannot read commit {short(commit)} in {root}: {text.strip()}",
            hint=f"install git and fetch the commit; {_INSTEAD}",
        ) from error
    directory.mkdir(parents=True)
    # "data" refuses absolute paths, links that lead outside, and device files.
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")
        return tar.pax_headers["comment"]
