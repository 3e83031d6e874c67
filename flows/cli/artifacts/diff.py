"""`nanochat diff`: show how two artifacts of a stage differ, or which stages of two runs do."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Parameter

from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run
from flows.cli.artifacts.compare import in_order, open_alike
from flows.cli.options import CHANGES, AsJson, ExitCode, StoreOptions
from flows.cli.output import age, aligned, print_result
from flows.cli.requests import command_of_run
from flows.identity.diff import Difference, FileChange, InputChange, Metric, compare, differ
from flows.identity.manifest import Input, Manifest
from flows.identity.ref import ArtifactRef, short
from flows.profiles import PROFILES
from flows.render.text import listed, number
from infra.parallel import in_parallel
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

Answer: TypeAlias = tuple[Any, list[str], bool]  # JSON, lines, True if equal
State: TypeAlias = Literal["=", "~", "-", "+"]  # the same, differs, only in the first, the second

_HELP = "An artifact (sft@tiny, sft/1a2b3c), or a run by its profile, tag or id."
_SHOWN_REASONS = 3
_MAX_VALUE = 40  # characters of a value that are shown


def diff(
    first: Annotated[str, Parameter(name="A", help=_HELP)],
    second: Annotated[str, Parameter(name="B", help="Another one, of the same kind.")],
    /,
    *,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Say how two artifacts of a stage differ, or which stages of two runs do, and why.

    With --exit-code it exits with 3 when they differ.
    """
    store = place.open_store()
    old, new = open_alike(store, (first, second))
    if isinstance(old, Manifest) and isinstance(new, Manifest):
        tree, lines, is_same = _compare_artifacts(old, new)
    else:
        assert isinstance(old, Run)
        assert isinstance(new, Run)
        tree, lines, is_same = _compare_runs(store, old, new)
    print_result(lambda: tree, lines, as_json=as_json)
    return CHANGES if exit_code and not is_same else 0


# Artifacts.


def _compare_artifacts(old: Manifest, new: Manifest) -> Answer:
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
    made = {name: getattr(manifest.provenance, name) for name in ("run", "created", "git_commit")}
    return {"fingerprint": manifest.fingerprint, "digest": manifest.digest, **made}


def _describe(old: Manifest, new: Manifest, found: Difference) -> Iterator[str]:
    yield from aligned([("-", *_origin(old)), ("+", *_origin(new))])
    yield ""
    yield "made from:"
    yield from (f"  {change}" for change in found.changes)
    yield from (f"  {_input_line(change)}" for change in found.inputs)
    yield ""
    if found.files:
        yield "files:"
        yield from aligned([_file_row(change) for change in found.files], right=(2, 3))
    else:
        yield "files: the same, to the byte"
    if found.metrics:
        yield ""
        yield "metrics:"
        head = ("", "", "old", "new", "difference")
        yield from aligned([head, *map(_metric_row, found.metrics)], right=(2, 3, 4))


def _origin(manifest: Manifest) -> tuple[str, str]:
    made = manifest.provenance
    commit = f", commit {short(made.git_commit)}" if made.git_commit else ""
    return manifest.name, f"made {age(made.created)} by run {made.run}{commit}"


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


def _compare_runs(store: Store, old: Run, new: Run) -> Answer:
    names = in_order(old.stages.keys() | new.stages.keys())
    stages = list(in_parallel(lambda name: _compare_stage(store, name, old, new), names))
    differing = [item["stage"] for item in stages if item["state"] != "="]
    tree = {"same": not differing, "old": asdict(old), "new": asdict(new), "stages": stages}
    lines = aligned([("-", *_run_row(old)), ("+", *_run_row(new))])
    lines += ["", *aligned([_stage_row(item) for item in stages])] if stages else []
    if not stages:
        summary = "neither has made anything yet"
    elif differing:
        summary = f"{len(differing)} of {len(stages)} stages differ: {', '.join(differing)}"
    else:
        summary = "no stage differs"
    return tree, [*lines, "", summary], not differing


def _compare_stage(store: Store, stage: str, first: Run, second: Run) -> dict[str, Any]:
    old, new = first.stages.get(stage), second.stages.get(stage)
    state: State = "+" if old is None else "-" if new is None else "=" if old == new else "~"
    # Reasons need both manifests, two reads of the store: only for stages that differ.
    reasons = _reasons(store, stage, old, new) if old and new and old != new else []
    return {"stage": stage, "state": state, "old": old, "new": new, "reasons": reasons}


def _reasons(store: Store, stage: str, old: str, new: str) -> list[str]:
    """Return why two artifacts differ, as far as their manifests still exist."""
    try:
        first, second = (
            find_manifest(store, ArtifactRef(stage, old)),
            find_manifest(store, ArtifactRef(stage, new)),
        )
    except ArtifactError as error:
        return [str(error)]
    if first is None or second is None:
        return [f"{stage}/{short(new if first else old)} is gone"]
    return [str(change) for change in compare(first.preimage, second.preimage)]


def _run_row(run: Run) -> tuple[str, ...]:
    # An imported run, or one of a removed profile, has no command.
    command = command_of_run(run) if run.profile in PROFILES else run.profile
    return run.run, run.status, age(run.started), command


def _stage_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    # dict.fromkeys: equal fingerprints are shown once.
    prints = dict.fromkeys(short(item[key]) for key in ("old", "new") if item[key])
    reasons = listed(item["reasons"], _SHOWN_REASONS)
    notes = {"=": "", "~": reasons, "-": "only in the first", "+": "only in the second"}
    return item["state"], item["stage"], " -> ".join(prints), notes[item["state"]]
