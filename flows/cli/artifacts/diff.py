"""`nanochat diff`: show how two artifacts of a stage differ, or which stages of two runs do."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter

from flows.artifacts.names import is_artifact, open_artifact, open_run
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, read_all
from flows.cli.options import AsJson, RunOptions, StoreOptions
from flows.cli.output import print_json, print_lines
from flows.identity.diff import Difference, FileChange, InputChange, Metric, compare, differ
from flows.identity.fingerprint import short
from flows.identity.manifest import Input, Manifest
from flows.profiles import PROFILES
from flows.render.table import columns
from flows.render.text import number
from flows.stages import STAGES
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

Answer: TypeAlias = tuple[Any, list[str], bool]  # JSON, lines, True if equal
State: TypeAlias = Literal["=", "~", "-", "+"]  # the same, differs, only in the first, the second

_HELP = "An artifact (sft@tiny, sft/1a2b3c), or a run by its profile, tag or id."
_SHOWN_REASONS = 3
_MAX_VALUE = 40  # characters of a value that are shown


@dataclass(frozen=True, kw_only=True)
class StageDifference:
    """One stage in two runs."""

    stage: str
    state: State
    old: str | None  # fingerprints
    new: str | None
    reasons: tuple[str, ...]


def diff(
    first: Annotated[str, Parameter(name="A", help=_HELP)],
    second: Annotated[str, Parameter(name="B", help="Another one, of the same kind.")],
    /,
    *,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Say how two artifacts of a stage differ, or which stages of two runs do, and why.

    Exits with 0 when they are the same, with 2 when they differ, with 1 on an error.
    """
    if is_artifact(first) != is_artifact(second):
        run, artifact = sorted((first, second), key=is_artifact)
        raise ConfigError(
            f"{run} is a run and {artifact} is an artifact",
            hint=f"compare two runs, or two artifacts: one of the run is like sft@{run}",
        )
    store = place.open_store()
    compare_two = _compare_artifacts if is_artifact(first) else _compare_runs
    tree, lines, is_same = compare_two(store, first, second)
    if as_json:
        print_json(tree)
    else:
        print_lines(lines)
    return 0 if is_same else 2


# Artifacts.


def _compare_artifacts(store: Store, first: str, second: str) -> Answer:
    old, new = read_all(lambda name: open_artifact(store, name), (first, second))
    if old.stage != new.stage:
        raise ConfigError(
            f"{old.name} and {new.name} are of different stages",
            hint=f"compare two artifacts of {old.stage}, or two of {new.stage}",
        )
    found = differ(old, new)
    # The digest as well: work that is not deterministic can give one fingerprint two contents.
    is_same = (old.fingerprint, old.digest) == (new.fingerprint, new.digest)
    tree = {
        "same": is_same,
        "stage": old.stage,
        "old": _to_tree(old),
        "new": _to_tree(new),
        "changes": [asdict(change) for change in found.changes],
        "inputs": [asdict(change) for change in found.inputs],
        "files": [asdict(change) for change in found.files],
        "metrics": [asdict(m) | {"difference": m.difference} for m in found.metrics],
    }
    if is_same:
        return tree, [f"{old.name} and {new.name} are the same artifact"], True
    return tree, list(_describe(old, new, found)), False


def _to_tree(manifest: Manifest) -> dict[str, Any]:
    made = manifest.provenance
    return {
        "fingerprint": manifest.fingerprint,
        "digest": manifest.digest,
        "run": made.run,
        "created": made.created,
        "git_commit": made.git_commit,
    }


def _describe(old: Manifest, new: Manifest, found: Difference) -> Iterator[str]:
    yield from columns([("-", *_origin(old)), ("+", *_origin(new))])
    yield ""
    yield "made from:"
    yield from (f"  {change}" for change in found.changes)
    yield from (f"  {_input_line(change)}" for change in found.inputs)
    yield ""
    if found.files:
        yield "files:"
        yield from columns([_file_row(change) for change in found.files], right=(2, 3))
    else:
        yield "files: the same, to the byte"
    if found.metrics:
        yield ""
        yield "metrics:"
        head = ("", "", "old", "new", "difference")
        yield from columns([head, *map(_metric_row, found.metrics)], right=(2, 3, 4))


def _origin(manifest: Manifest) -> tuple[str, str]:
    made = manifest.provenance
    commit = f", commit {short(made.git_commit)}" if made.git_commit else ""
    return manifest.name, f"made {made.created} by run {made.run}{commit}"


def _input_line(change: InputChange) -> str:
    if change.old is None or change.new is None:
        return f"input {change.stage} {'added' if change.old is None else 'removed'}"
    is_rebuilt = change.old.fingerprint == change.new.fingerprint

    def called(source: Input) -> str:
        """Return the short fingerprint, or digest if the fingerprints are equal."""
        return short(source.digest if is_rebuilt else source.fingerprint)

    what = ", the same work with another result" if is_rebuilt else ""
    return f"input {change.stage} {called(change.old)} -> {called(change.new)}{what}"


def _file_row(change: FileChange) -> tuple[str, ...]:
    sizes = ("" if n is None else f"{n:,} bytes" for n in (change.old, change.new))
    if change.old is None or change.new is None:
        return ("", change.path, *sizes, "added" if change.old is None else "removed")
    return ("", change.path, *sizes, "changed")


def _metric_row(metric: Metric) -> tuple[str, ...]:
    difference = metric.difference
    return (
        "",
        metric.name,
        _shown(metric.old),
        _shown(metric.new),
        "" if difference is None else number(difference, digits=6, sign="+" if difference else ""),
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if type(value) in (int, float):  # not isinstance: a bool is an int
        return number(value, digits=6)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


# Runs.


def _compare_runs(store: Store, first: str, second: str) -> Answer:
    old, new = read_all(lambda name: open_run(store, name), (first, second))
    known = old.stages.keys() | new.stages.keys()
    names = [stage.name for stage in STAGES if stage.name in known]
    names += sorted(known - set(names))  # of an older table
    stages = read_all(lambda name: _compare_stage(store, name, old, new), names)
    differing = [item.stage for item in stages if item.state != "="]
    tree = {
        "same": not differing,
        "old": asdict(old),
        "new": asdict(new),
        "stages": [asdict(item) for item in stages],
    }
    lines = columns([("-", *_run_row(old)), ("+", *_run_row(new))])
    lines += ["", *columns([_stage_row(item) for item in stages])] if stages else []
    lines += ["", _summary(len(stages), differing)]
    return tree, lines, not differing


def _compare_stage(store: Store, stage: str, first: Run, second: Run) -> StageDifference:
    old, new = first.stages.get(stage), second.stages.get(stage)
    state: State = "+" if old is None else "-" if new is None else "=" if old == new else "~"
    # Reasons need both manifests, two reads of the store: only for stages that differ.
    reasons: list[str] = []
    if old is not None and new is not None and old != new:
        reasons = _reasons(store, stage, old, new)
    return StageDifference(stage=stage, state=state, old=old, new=new, reasons=tuple(reasons))


def _reasons(store: Store, stage: str, old: str, new: str) -> list[str]:
    """Return why two artifacts differ, as far as their manifests still exist."""
    try:
        first, second = find_manifest(store, stage, old), find_manifest(store, stage, new)
    except ArtifactError as error:
        return [str(error)]
    if first is None or second is None:
        return [f"{stage}/{short(new if first else old)} is gone"]
    return [str(change) for change in compare(first.preimage, second.preimage)]


def _run_row(run: Run) -> tuple[str, ...]:
    what = RunOptions(depth=run.depth, overrides=run.overrides, uses=run.uses)
    # An imported run, or one of a removed profile, has no command.
    command = what.command(run.profile) if run.profile in PROFILES else run.profile
    return run.run, run.status, run.started, command


def _stage_row(item: StageDifference) -> tuple[str, ...]:
    prints = [short(fingerprint) for fingerprint in (item.old, item.new) if fingerprint]
    more = len(item.reasons) - _SHOWN_REASONS
    reasons = ", ".join(item.reasons[:_SHOWN_REASONS]) + (f" and {more} more" if more > 0 else "")
    # dict.fromkeys: equal fingerprints are shown once.
    notes = {"=": "", "~": reasons, "-": "only in the first", "+": "only in the second"}
    return item.state, item.stage, " -> ".join(dict.fromkeys(prints)), notes[item.state]


def _summary(count: int, differing: list[str]) -> str:
    if not count:
        return "neither has made anything yet"
    if not differing:
        return "no stage differs"
    return f"{len(differing)} of {count} stages differ: {', '.join(differing)}"
