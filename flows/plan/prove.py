"""Prove that old and new code compute the same: run one job with both and compare the results.

A stage that trains is stopped after a few steps. The values it logged are compared bit by bit, then
the state it saved: a difference in one weight may be too small to show in the next loss. Any other
stage runs to its end, and its output files are compared: an accuracy over a few examples may be
equal by chance. So are the files of a training stage that ends before it is stopped.

The old code is the commit that the artifact was built from, exported from git into a directory of
its own. It runs with today's packages, on this machine, as the new code does.
"""

import importlib.metadata
import io
import json
import re
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from flows.identity.diff import compare
from flows.identity.fingerprint import Code, Identity, code_of, fingerprint_of
from flows.identity.manifest import Manifest
from flows.identity.ref import short
from flows.render.text import listed
from flows.stages import Stage
from infra.launch.torchrun import JobFailed, StageInterrupted, run_job
from infra.storage.files import sha256_of
from nanochat_core.errors import ArtifactError, StageError, reason_of
from nanochat_core.job import Job
from nanochat_core.section import Tree

STEPS = 5
# Measured by a clock: they differ between any two runs.
_SPEEDS = frozenset({"dollars", "mfu", "seconds", "tokens_per_second"})
# Another version of these may list the same code with other names and digests.
_SCANNER = (
    *("flows/identity/cpp_source.py", "flows/identity/fingerprint.py", "flows/identity/syntax.py"),
    "tasks/names.py",
)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SECONDS_BETWEEN_LINES = 2.0
_SHOWN_CHANGES = 3
_SHOWN_TEXT = 24  # characters: all of a number, the beginning of a digest
_STATE = "state after the last step: "
_INSTEAD = "run the stage again, or accept it without --prove"

Log: TypeAlias = Callable[[str], None]
Values: TypeAlias = dict[tuple[str, int, str], str]  # kind of event, step, name -> its JSON


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A record of what was compared and found equal."""

    kind: Literal["steps", "files"]
    steps: int  # done by both; 0: the stage has no steps
    compared: int  # values, or files
    with_state: bool  # weights and optimizer state after the last step were compared too
    digest: str  # of all that was compared
    old_commit: str
    new_commit: str | None  # None: today's code has uncommitted changes
    torch: str
    device: str  # "cpu" or "cuda"
    processes: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The logged values, the output and the saved state of one job."""

    steps: int
    values: Values
    files: dict[str, str] | None  # path -> sha256; None: the job was stopped
    state: dict[str, str]  # of a stopped job: what it saved after its last step, as `files`


def prove(
    stage: Stage,
    identity: Identity,
    manifest: Manifest,
    job: Job,
    *,
    processes: int,
    steps: int,
    root: Path,
    scratch: Path,
    log: Log,
) -> Proof:
    """Run `job` with the code that made `manifest` and with that of `identity`, in `root`.

    `job` runs in directories under `scratch`. Raises ArtifactError if the results differ, with the
    first value that does, and if the old code is not available or does not run.
    """
    assert steps > 0, steps
    config = cast("dict[str, Tree]", identity.preimage["config"])
    commit = _open_commit(manifest, root)
    old_root = scratch / "code"
    _take_out(root, commit, old_root)
    # A manifest names a commit even if the work tree was dirty: compare the digests that it was
    # fingerprinted with.
    if changes := _listed_changes(stage, old_root, config, code_that_made(manifest)):
        # The digests may differ because the code that computes them changed, not the stage's.
        if _scanner(old_root) != _scanner(root):
            raise ArtifactError(
                f"{manifest.name} was fingerprinted by another version of the code: unknown "
                f"whether commit {short(commit)} holds what made it",
                hint=_INSTEAD,
            )
        raise ArtifactError(
            f"commit {short(commit)} does not hold the code of {manifest.name}: {changes}",
            hint=f"it was built from uncommitted changes; {_INSTEAD}",
        )
    trains = "optimizer" in stage.config
    traces: list[Trace] = []
    for name, code in (("old", old_root), ("new", root)):
        directory = scratch / name
        log(f"{name} code: {'up to ' + str(steps) + ' steps' if trains else 'to the end'}")
        traces.append(
            _trace(
                replace(job, directory=directory),
                code,
                processes=processes,
                steps=steps if trains else None,
                log=lambda text, name=name: log(f"{name} code: {text}"),
                name=name,
            )
        )
    # Both runs took minutes: what ran as the new code may not be what `identity` covers.
    if changes := _listed_changes(stage, root, config, identity.preimage["code"]):
        raise ArtifactError(
            f"{root} was edited while {stage.name} was proven: {changes}",
            hint="run the command again",
        )
    old, new = traces
    kind, compared = _compare(old, new)
    return Proof(
        kind=kind,
        with_state=any(name.startswith(_STATE) for name in compared),
        steps=min(old.steps, new.steps),
        compared=len(compared),
        digest=fingerprint_of(compared),
        old_commit=commit,
        new_commit=_find_commit(stage, root, identity, scratch / "head"),
        torch=importlib.metadata.version("torch"),
        device=job.resources.device,
        processes=processes,
    )


def code_that_made(manifest: Manifest) -> Tree:
    """Return the digests of the code that made the files, also for an accepted artifact."""
    return manifest.accepted["code"] if manifest.accepted else manifest.preimage["code"]


def _trace(
    job: Job, root: Path, *, processes: int, steps: int | None, log: Log, name: str
) -> Trace:
    """Run a job with the code in `root`, and stop it after `steps` steps. None means never."""
    watch = _Watch(steps, log)
    try:
        run_job(job, processes=processes, on_event=watch, stop=watch.stop, root=root, steps=steps)
    except StageInterrupted:
        if not watch.stop.is_set():
            raise
        state = _saved_after(job, watch.last_step)
        return Trace(steps=watch.steps, values=watch.values, files=None, state=state)
    except StageError as error:
        tail = error.log_tail.splitlines()[-1:] if isinstance(error, JobFailed) else []
        raise ArtifactError(
            f"the {name} code cannot run the job: {error}",
            hint="; ".join([*tail, _INSTEAD]),
        ) from error
    return Trace(steps=watch.steps, values=watch.values, files=_files_in(job.output), state={})


class _Watch:
    """A callback that collects the values of a job's events, up to the last step that counts.

    Old code may not know the `steps` argument: then this stops the job, a little late.
    """

    def __init__(self, limit: int | None, log: Log) -> None:
        self.stop = threading.Event()
        self.values: Values = {}
        self.steps = 0
        self.last_step = 0
        self._limit = limit
        self._log = log
        self._reported = float("-inf")  # monotonic seconds of the last line

    def __call__(self, event: dict[str, Any]) -> None:
        if self.stop.is_set():
            return
        kind = event["kind"]
        if kind not in ("start", "step", "eval"):
            return
        found: dict[str, Any] = event.get("values", {})
        logged = found | ({"of": event["total"]} if "total" in event else {})
        for name, value in logged.items():
            if name not in _SPEEDS:
                # As JSON text: equal to the last bit, and nan equals nan.
                self.values[kind, event["step"], name] = json.dumps(value)
        if kind == "step":
            self.steps, self.last_step = self.steps + 1, event["step"]
            self._say(event, found)
            if self.steps == self._limit:
                self.stop.set()

    def _say(self, event: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if self._limit is None and now - self._reported < _SECONDS_BETWEEN_LINES:
            return
        self._reported = now
        shown = [f"{n} {v:.6g}" for n, v in values.items() if n not in _SPEEDS]
        self._log(" ".join([f"step {event['step']}/{event['total']}", *shown]))


def _compare(old: Trace, new: Trace) -> tuple[Literal["steps", "files"], dict[str, Tree]]:
    """Return what was compared, all equal. Raises ArtifactError with the first difference."""
    if old.files is not None and new.files is not None:
        _check_equal(old.files, new.files, lambda path: f"file {path}")
        return "files", dict(new.files)
    _check_equal(old.values, new.values, lambda key: f"{key[0]} {key[1]}: {key[2]}")
    found = {f"{kind} {step} {name}": v for (kind, step, name), v in new.values.items()}
    if old.state and new.state:  # shows differences too small for the losses
        _check_equal(old.state, new.state, lambda path: f"{_STATE}{path}")
        found |= {f"{_STATE}{path}": digest for path, digest in new.state.items()}
    return "steps", dict(found)


def _check_equal(
    old: Mapping[Any, str], new: Mapping[Any, str], called: Callable[[Any], str]
) -> None:
    # In the old run's order, so that the first difference is the earliest one.
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            before, after = (_shown(values.get(key)) for values in (old, new))
            raise ArtifactError(
                f"{called(key)} is {before} with the old code, {after} with the new",
                hint="the change decides results: run the stage. If even one code does not repeat "
                "itself on this device, prove it on the CPU with --gpus 0",
            )
    if not new:
        raise ArtifactError("the job logged nothing that could be compared", hint=_INSTEAD)


def _shown(text: str | None) -> str:
    return "missing" if text is None else text[:_SHOWN_TEXT]


def _saved_after(job: Job, step: int) -> dict[str, str]:
    """Return the digests of a stopped job's checkpoint; empty if it is not of this very step."""
    directory = job.checkpoints / f"step-{step:07d}"
    if not (directory / "COMMIT.json").exists():
        return {}
    # COMMIT.json holds the seconds trained, which differ between any two runs.
    return {p: d for p, d in _files_in(directory).items() if p != "COMMIT.json"}


def _files_in(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): sha256_of(path) for path in files}


# The code of a commit.


def _open_commit(manifest: Manifest, root: Path) -> str:
    commit = manifest.provenance.git_commit
    if commit is None or not _COMMIT.fullmatch(commit):
        raise ArtifactError(
            f"{manifest.name} was built outside git, so its code is not available",
            hint=_INSTEAD,
        )
    _git(root, "rev-parse", "--git-dir")  # so that "no repository" is not reported as "no commit"
    try:
        _git(root, "cat-file", "-e", f"{commit}^{{commit}}")
    except ArtifactError as error:
        raise ArtifactError(
            f"{manifest.name} was built from commit {short(commit)}, which is not in {root}",
            hint=f"fetch it with git; {_INSTEAD}",
        ) from error
    return commit


def _take_out(root: Path, commit: str, directory: Path) -> None:
    """Export a commit into a directory of its own; index and work tree stay as they are."""
    archive = _git(root, "archive", "--format=tar", commit)
    directory.mkdir(parents=True)
    # "data" refuses absolute paths, links that lead outside, and device files.
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")


def _listed_changes(stage: Stage, root: Path, config: dict[str, Tree], code: Tree) -> str:
    """Return how the code in `root` differs from that of a pre-image; "" if it does not."""
    found: dict[str, Tree] = dict(_closure(stage, root, config))
    return listed(compare({"code": code}, {"code": found}), _SHOWN_CHANGES)


def _scanner(root: Path) -> list[bytes | None]:
    """Return the contents of the files that compute code digests; None for a missing one."""
    paths = (root / name for name in _SCANNER)
    return [path.read_bytes() if path.is_file() else None for path in paths]


def _closure(stage: Stage, root: Path, config: dict[str, Tree]) -> dict[str, str]:
    """Return the digests of the code that the stage runs in `root`; empty without its entry."""
    entry = root.joinpath(*stage.entry.split("."))
    if not entry.with_name(f"{entry.name}.py").is_file():
        return {}
    return code_of(stage, config, code=Code(root))


def _find_commit(stage: Stage, root: Path, identity: Identity, scratch: Path) -> str | None:
    """Return the commit that is checked out, if it holds the code that was run."""
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    _take_out(root, commit, scratch)
    code = cast("dict[str, str]", identity.preimage["code"])
    config = cast("dict[str, Tree]", identity.preimage["config"])
    return commit if _closure(stage, scratch, config) == code else None


def _git(root: Path, *arguments: str) -> bytes:
    """Return the output of a git command in `root`. Raises ArtifactError if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,  # a prompt would wait for input that nothing shows
        )
    except OSError as error:
        raise ArtifactError(
            f"git cannot be run: {reason_of(error)}",
            hint=f"install git; {_INSTEAD}",
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[:1]
        raise ArtifactError(
            f"git {arguments[0]} failed in {root}: {' '.join(said)}",
            hint=_INSTEAD,
        )
    return done.stdout
