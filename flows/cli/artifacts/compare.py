"""`nanochat compare`: how runs, or artifacts of one stage, differ, and what each gave."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.artifacts.names import is_artifact, open_artifact, open_run
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run
from flows.cli.options import CHANGES, AsJson, ExitCode, NotNegative, StoreOptions
from flows.cli.output import age, print_json, print_lines, print_warning
from flows.cli.requests import command_of_run
from flows.compare.score_table import Compared, page_of, score_rows, stage_title
from flows.identity.diff import Change, differ
from flows.identity.diff import compare as differ_in_causes
from flows.identity.manifest import Manifest
from flows.identity.records import unless_damaged
from flows.identity.ref import ArtifactRef, short
from flows.profiles import PROFILES
from flows.render.charts import Chart
from flows.render.paired import Delta
from flows.render.table import Table, texts
from flows.render.text import listed
from flows.stages import in_order
from infra.storage.base import Store
from infra.storage.files import write_whole, writing
from nanochat_core.errors import ConfigError

_MAX_ANSWER = 60  # characters
_MAX_CHANGES = 8
_MAX_REASONS = 3


def compare(
    *references: Annotated[str, Parameter(name="REF")],
    answers: NotNegative = 0,
    html: Path | None = None,
    place: StoreOptions = StoreOptions(),
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Compare runs or artifacts with the first of them: how they differ, and what each measured.

    First which scores are better and worse and what differs in settings and code, then the scores,
    then training with its curves, below each other on one scale. At the end when each was made, and
    which stages of runs, or inputs and files of artifacts, are not the same. With --exit-code it
    exits with 3 when one of them differs from the first.

    A difference is called better or worse if it is larger than other questions of the same kind
    would explain: its 95 % interval excludes 0. The interval is of pairs where the same questions
    were answered or the same text was read. Another seed of training may still explain it. gained
    and lost count answers that became right and wrong.

    Args:
        references: Two or more runs, by profile, tag or id, or artifacts of one stage (sft@tiny).
        answers: Changed answers that are printed of each task; 0 for none.
        html: Write a page with the scores and all curves of training to this file.
    """
    from flows.compare.curves import curve_tree, curves_of

    if len(references) < 2:
        raise ConfigError(
            "compare needs at least two runs or artifacts",
            hint="nanochat compare main mine, or nanochat compare sft@main sft@mine",
        )
    store = place.open_store()
    items = open_alike(store, references)
    found = _by_stage(store, items)
    curves: dict[str, list[Chart]] = {}
    stages: list[dict[str, Any]] = []
    for name in in_order({stage for each in found for stage in each}):
        manifests = [each.get(name) for each in found]
        stage = _compare_stage(store, name, manifests)
        # Curves need the events of every artifact.
        if len(set(stage["fingerprints"])) > 1:
            curves[name] = curves_of(store, name, manifests)
        # Drop stages that measured nothing, such as tokens: a run has all of them.
        if stage["scores"] or stage["same"] or curves.get(name):
            stages.append(stage)
    differences = [
        difference
        for name, item, manifests in list(zip(references, items, found, strict=True))[1:]
        for difference in _differences(name, (items[0], item), (found[0], manifests))
    ]
    if as_json:
        trees = [{**s, "curves": list(map(curve_tree, curves.get(s["stage"], ())))} for s in stages]
        made = [asdict(i) if isinstance(i, Run) else asdict(i.provenance) for i in items]
        result = {"references": references, "same": not differences, "made": made}
        print_json({**result, "differences": differences, "stages": trees})
    compared = Compared(
        names=references,
        changes=_changes(differences),
        scores=[*score_rows(stages, evaluated=True)],
        others=[*score_rows(stages, evaluated=False)],
        charts=[chart for of_stage in curves.values() for chart in of_stage],
        same=list(dict.fromkeys(stage_title(s["stage"]) for s in stages if s["same"])),
    )
    if html is not None:
        with writing(html, ConfigError, hint="name a file in an existing directory, with --html"):
            write_whole(html.expanduser(), page_of(compared).encode())
    if not as_json:
        print_lines(_lines(compared, stages, answers))
        rows = [row for difference in differences for row in _difference_rows(difference)]
        origins = [(n, *_origin(item)) for n, item in zip(references, items, strict=True)]
        made = Table(columns=texts("name", "of", "made", "by"), rows=origins, head=False)
        columns = texts("name", "state", "what", "change", "why")
        changed = Table(columns=columns, rows=rows, head=False)
        print_lines(["", made, "", changed if rows else "there is no difference"])
        print_lines([] if html is None else [str(html)])
    return CHANGES if exit_code and differences else 0


def open_alike(store: Store, references: Sequence[str]) -> list[Manifest | Run]:
    """Return the runs, or the artifacts of one stage, that these names stand for.

    Raises ConfigError if they are of several kinds.
    """
    items = [
        open_artifact(store, name) if is_artifact(name) else open_run(store, name)
        for name in references
    ]
    kinds = dict.fromkeys(i.stage if isinstance(i, Manifest) else "a run" for i in items)
    if len(kinds) > 1:
        raise ConfigError(
            f"these are not alike: {', '.join(kinds)}",
            hint="compare runs, or artifacts of one stage, such as sft@RUN",
        )
    return items


def _by_stage(store: Store, items: Sequence[Manifest | Run]) -> list[dict[str, Manifest]]:
    """Return the artifacts of each run by stage; one that several runs have is read once."""

    @functools.cache
    def find(ref: ArtifactRef) -> Manifest | None:
        return unless_damaged(lambda: find_manifest(store, ref), print_warning)

    # What is damaged, or was deleted, is left out; the others can be compared.
    return [
        {item.stage: item}
        if isinstance(item, Manifest)
        else {ref.stage: found for ref in item.refs if (found := find(ref)) is not None}
        for item in items
    ]


def _differences(
    name: str, items: Sequence[Manifest | Run], found: Sequence[Mapping[str, Manifest]]
) -> Iterator[dict[str, Any]]:
    """Yield what differs between the first and `name`, a tree for each stage that differs."""
    refs = [
        {ref.stage: ref for ref in (item.refs if isinstance(item, Run) else [item.ref])}
        for item in items
    ]
    for stage in in_order({*refs[0], *refs[1]}):
        old, new = (each.get(stage) for each in refs)
        made = [each.get(stage) for each in found]
        # The digest as well: work that is not deterministic can give one fingerprint two contents.
        if old == new and len({manifest and manifest.digest for manifest in made}) == 1:
            continue
        tree: dict[str, Any] = {"reference": name, "stage": stage, "reasons": []}
        tree |= {"state": "+" if old is None else "-" if new is None else "~"}
        tree |= {"old": old and old.fingerprint, "new": new and new.fingerprint}
        first, second = made
        if first and second:
            reasons = differ_in_causes(first.preimage, second.preimage)
            tree |= {"reasons": list(map(str, reasons)), **differ(first, second)}
        elif old and new:
            lost = [r.name for r, m in zip((old, new), made, strict=True) if m is None]
            tree["reasons"] = [f"{name} is gone or damaged" for name in lost]
        yield tree | {"of_runs": isinstance(items[0], Run)}


def _origin(item: Manifest | Run) -> tuple[str, ...]:
    """Return when and by which command or run something was made."""
    if isinstance(item, Run):
        # An imported run, or one of a removed profile, has no command.
        command = command_of_run(item) if item.profile in PROFILES else item.profile
        return item.status, age(item.started), command
    made = item.provenance
    commit = f", commit {short(made.git_commit)}" if made.git_commit else ""
    return item.name, age(made.created), f"run {made.run}{commit}"


def _difference_rows(tree: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a line for a stage; for two artifacts also one for each file."""
    name, state, stage = (tree[key] for key in ("reference", "state", "stage"))
    prints = dict.fromkeys(short(tree[side]) for side in ("old", "new") if tree[side])
    notes = {"+": "not in the first", "-": "only in the first"}
    reasons = listed(tree["reasons"], _MAX_REASONS if tree["of_runs"] else len(tree["reasons"]))
    yield name, state, stage, " -> ".join(prints), notes.get(state, reasons)
    if tree["of_runs"]:
        return
    for change in tree["files"]:
        old, new = (s if s is None else f"{s:,} bytes" for s in (change["old"], change["new"]))
        what = f"added, {new}" if old is None else f"removed, {old}" if new is None else None
        yield name, "file", change["path"], what or f"{old} -> {new}", ""
    if not tree["files"]:
        yield name, "files", "the same, to the byte", "", ""


def _compare_stage(
    store: Store, stage: str, manifests: Sequence[Manifest | None]
) -> dict[str, Any]:
    """Return a stage's scores and their differences from the first, as JSON values."""
    from flows.compare.compare import pairs_of, scores_of
    from flows.render.paired import NONE, delta_of

    scores = [scores_of(manifest) if manifest else {} for manifest in manifests]
    names = list(dict.fromkeys(name for each in scores for name in each))
    fingerprints = [manifest and manifest.fingerprint for manifest in manifests]
    same = len(set(fingerprints)) == 1
    tree: dict[str, Any] = {
        "stage": stage,
        "fingerprints": fingerprints,
        "same": same and bool(names),
        "scores": [],
        "answers": [[] for _ in manifests],
        "not_paired": [None for _ in manifests],
    }
    if same or not names:
        return tree
    paired = [NONE, *pairs_of(store, manifests)]
    for name in names:
        first = scores[0].get(name)
        cells: list[dict[str, Any] | None] = []
        for index, score in enumerate(each.get(name) for each in scores):
            cell = score and asdict(score)
            if cell and score and first and index:
                delta = delta_of(first, score, paired[index].differences.get(name))
                # Compared with itself it differs by 0 exactly, without an interval.
                if fingerprints[index] == fingerprints[0]:
                    delta = Delta(value=0.0)
                cell["delta"] = {**asdict(delta), "clear": delta.is_clear}
            cells.append(cell)
        tree["scores"].append({"metric": name, "of": cells})
    tree["answers"] = [
        [{**asdict(item), "delta": asdict(item.interval)} for item in pairs.by_task.values()]
        for pairs in paired
    ]
    tree["not_paired"] = [pairs.why_not for pairs in paired]
    return tree


def _lines(
    compared: Compared, stages: Sequence[Mapping[str, Any]], answers: int
) -> Iterator[str | Table]:
    from flows.compare.curves import drawn

    yield from compared.verdicts
    yield from compared.differences(_MAX_CHANGES)
    for title, rows in (("score", compared.scores), ("training", compared.others)):
        if rows:
            yield from ("", compared.table(title, rows))
    if changed := list(_answers_of(compared.names, stages, answers)):
        yield from ("", *changed)
    for chart in compared.charts:
        yield from ("", *drawn(chart, compared.names))
    if compared.same:
        yield from ("", compared.same_artifacts)


def _answers_of(
    references: Sequence[str], stages: Sequence[Mapping[str, Any]], shown: int
) -> Iterator[str]:
    for stage in stages:
        title = stage_title(stage["stage"])
        answers = zip(references, stage["not_paired"], stage["answers"], strict=True)
        for name, why_not, tasks in answers:
            if why_not:
                yield f"{title}: {name} was not asked what {references[0]} was: {why_not}"
            for task in tasks:
                yield (
                    f"{title} {task['task']}: {name} gained {task['gained']} and lost "
                    f"{task['lost']} of {task['total']} questions; "
                    f"{len(task['changed'])} answers changed"
                )
                for item in task["changed"][:shown]:
                    old, new = (
                        f"{_cut(str(item[side]))} ({'right' if item[key] else 'wrong'})"
                        for side, key in (("old", "was_right"), ("new", "is_right"))
                    )
                    yield f"  {item['place']}: {old} -> {new}"


def _changes(differences: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return what each reference after the first was made with that the first was not."""
    made: dict[str, dict[str, None]] = {}
    for tree in differences:
        changes = (str(Change(**change)) for change in tree.get("changes", ()))
        made.setdefault(tree["reference"], {}).update(dict.fromkeys(changes))
    return {name: list(changes) for name, changes in made.items() if changes}


def _cut(text: str) -> str:
    # Keep the end of a long answer: that is where its result is.
    text = " ".join(text.split())
    return text if len(text) <= _MAX_ANSWER else f"...{text[3 - _MAX_ANSWER :]}"
