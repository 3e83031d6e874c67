"""`nanochat compare`: scores and training curves of runs, or of artifacts of one stage."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.artifacts.names import is_artifact, open_artifact, open_run
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run, read_all
from flows.cli.options import AsJson, NotNegative, StoreOptions
from flows.cli.output import aligned, print_result, screen
from flows.identity.diff import Change
from flows.identity.diff import compare as differ_in_causes
from flows.identity.manifest import Manifest
from flows.render.charts import Chart
from flows.render.score import Delta, Score
from flows.render.table import Row
from flows.render.text import listed, number
from flows.stages import STAGES
from infra.storage.base import Store
from nanochat_core.errors import ConfigError

_MAX_ANSWER = 60  # characters
_MAX_CHANGES = 8
MODELS = {stage.name for stage in STAGES if stage.model or stage.compute == "cpu"}


def compare(
    *references: Annotated[
        str,
        Parameter(
            name="REF",
            help="Two or more runs, by profile, tag or id, or artifacts of one stage (sft@tiny).",
        ),
    ],
    answers: Annotated[
        NotNegative, Parameter(help="Changed answers that are printed of each task; 0 for none.")
    ] = 0,
    html: Annotated[
        Path | None,
        Parameter(help="Write a page with the scores and all curves of training to this file."),
    ] = None,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Compare what runs or artifacts measured with the first of them, with intervals.

    First what differs in settings and code, then scores of evaluations, then training with its
    curves, below each other on one scale.

    A difference marked * is larger than other questions of the same kind would explain: its 95 %
    interval leaves out 0. The interval is of pairs where the same questions were answered or the
    same text was read. Another seed of training may still explain it. gained and lost count answers
    that became right and wrong.
    """
    import tempfile

    from flows.compare.curves import curve_tree, curves_of
    from flows.compare.page import Compared, render, write

    if len(references) < 2:
        raise ConfigError(
            "compare needs at least two runs or artifacts",
            hint="nanochat compare main mine, or nanochat compare sft@main sft@mine",
        )
    store = place.open_store()
    found = [_by_stage(store, item) for item in open_alike(store, references)]
    # Evaluations of the last model first: they are what one compares for.
    names = in_order({stage for each in found for stage in each})
    names = [n for n in reversed(names) if n not in MODELS] + [n for n in names if n in MODELS]
    curves: dict[str, list[Chart]] = {}
    rows: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory(prefix="nanochat-compare-") as directory:
        stages: list[dict[str, Any]] = []
        for name in names:
            manifests = [each.get(name) for each in found]
            stage, rows[name] = _compare_stage(store, name, manifests)
            # Curves need the events of every artifact.
            if len(set(stage["fingerprints"])) > 1:
                curves[name] = curves_of(store, name, manifests, Path(directory))
            # Drop stages that measured nothing, such as tokens: a run has all of them.
            if stage["scores"] or stage["same"] or curves.get(name):
                stages.append(stage)
    if html is not None:
        compared = [
            Compared(
                name=stage["stage"],
                same=stage["same"],
                rows=rows[stage["stage"]],
                curves=curves.get(stage["stage"], ()),
            )
            for stage in stages
        ]
        write(html, render(references, changes_of(references, stages), compared))

    def tree() -> dict[str, Any]:
        trees = [{**s, "curves": list(map(curve_tree, curves.get(s["stage"], ())))} for s in stages]
        return {"references": references, "stages": trees}

    print_result(tree, _lines(references, stages, rows, curves, answers), as_json=as_json)
    if html is not None and not as_json:
        screen().print(str(html))
    return 0


def open_alike(store: Store, references: Sequence[str]) -> list[Manifest] | list[Run]:
    """Return the artifacts, all of one stage, or the runs that these names stand for.

    Raises ConfigError if runs and artifacts are mixed, or artifacts are of different stages.
    """
    kinds = {is_artifact(name) for name in references}
    if len(kinds) > 1:
        run, artifact = (next(n for n in references if is_artifact(n) == k) for k in (False, True))
        raise ConfigError(
            f"{run} is a run and {artifact} is an artifact",
            hint=f"compare runs, or artifacts: one of the run is like sft@{run}",
        )
    if kinds != {True}:
        return read_all(lambda name: open_run(store, name), references)
    manifests = read_all(lambda name: open_artifact(store, name), references)
    stages = sorted({manifest.stage for manifest in manifests})
    if len(stages) > 1:
        raise ConfigError(
            f"the artifacts are of different stages: {', '.join(stages)}",
            hint="compare artifacts of one stage, or whole runs",
        )
    return manifests


def in_order(names: Collection[str]) -> list[str]:
    """Return stages in the table's order, then those of older versions, which it lacks."""
    known = [stage.name for stage in STAGES if stage.name in names]
    return known + sorted(set(names) - set(known))


def _by_stage(store: Store, item: Manifest | Run) -> dict[str, Manifest]:
    if isinstance(item, Manifest):
        return {item.stage: item}
    manifests = read_all(lambda ref: find_manifest(store, ref), item.refs)
    # An artifact that garbage collection has deleted is left out; the others can be compared.
    return {manifest.stage: manifest for manifest in manifests if manifest is not None}


def _compare_stage(
    store: Store, stage: str, manifests: Sequence[Manifest | None]
) -> tuple[dict[str, Any], list[list[str]]]:
    """Return a stage's scores and their differences from the first, as JSON and as table rows.

    A row is the metric, then for each reference its score and the difference.
    """
    from flows.compare.compare import pairs_of, scores_of
    from flows.render.paired import NONE, delta_of

    scores = [scores_of(manifest) if manifest else {} for manifest in manifests]
    base = manifests[0]
    names = list(dict.fromkeys(name for each in scores for name in each))
    same = len({manifest and manifest.fingerprint for manifest in manifests}) == 1
    tree: dict[str, Any] = {
        "stage": stage,
        "fingerprints": [manifest and manifest.fingerprint for manifest in manifests],
        "same": same and bool(names),
        "changes": [
            [str(change) for change in changes_between(base, manifest)] for manifest in manifests
        ],
        "scores": [],
        "answers": [[] for _ in manifests],
        "not_paired": [None for _ in manifests],
    }
    rows: list[list[str]] = []
    if same or not names:
        return tree, rows
    paired = [NONE, *pairs_of(store, manifests)]
    for name in names:
        first = scores[0].get(name)
        cells: list[dict[str, Any] | None] = []
        row = [name]
        of_name = [each.get(name) for each in scores]
        for index, score in enumerate(of_name):
            delta = None
            cell = score and asdict(score)
            if cell and score and first and index:
                delta = delta_of(first, score, paired[index].differences.get(name))
                cell["delta"] = {**asdict(delta), "clear": delta.is_clear}
            cells.append(cell)
            row += [_shown(score), delta.text if delta else ""]
        # Counts such as rows and ranks are of interest where they differ.
        if any(score is None or score.low is not None or score != first for score in of_name):
            rows.append(row)
        tree["scores"].append({"metric": name, "of": cells})
    tree["answers"] = [
        [{**asdict(item), "delta": asdict(item.interval)} for item in pairs.by_task.values()]
        for pairs in paired
    ]
    tree["not_paired"] = [pairs.why_not for pairs in paired]
    return tree, rows


def changes_between(old: Manifest | None, new: Manifest | None) -> list[Change]:
    """Return the settings, code and formats that differ, without what differs in the inputs."""
    if old is None or new is None:
        return []
    return differ_in_causes(old.preimage, new.preimage, with_inputs=False)


def _lines(
    references: Sequence[str],
    stages: Sequence[Mapping[str, Any]],
    rows: Mapping[str, Sequence[Row]],
    curves: Mapping[str, Sequence[Chart]],
    answers: int,
) -> Iterator[str]:
    if not stages:
        yield "nothing that they made measured anything"
    changes = changes_of(references, stages)
    for name, of_name in changes.items():
        yield f"{name} differs from {references[0]} in {listed(of_name, _MAX_CHANGES)}"
    if changes:
        yield ""
    for stage in (stage for stage in stages if not stage["same"]):
        found = rows[stage["stage"]], curves.get(stage["stage"], ())
        yield from _lines_of(references, stage, *found, answers)
    if same := [stage["stage"] for stage in stages if stage["same"]]:
        yield f"the same artifact: {', '.join(same)}"


def _lines_of(
    references: Sequence[str],
    stage: Mapping[str, Any],
    rows: Sequence[Row],
    curves: Sequence[Chart],
    answers: int,
) -> Iterator[str]:
    """Return the lines of one stage whose artifacts differ."""
    from flows.compare.curves import drawn

    if rows:
        head = [stage["stage"], *(word for name in references for word in (name, ""))]
        yield from aligned([head, *rows])
    else:
        yield stage["stage"]
    yield ""
    for found in curves:
        yield from drawn(found, references)
        yield ""
    for name, why_not, tasks in zip(references, stage["not_paired"], stage["answers"], strict=True):
        if why_not:
            yield f"{name} was not asked what {references[0]} was: {why_not}"
        for task in tasks:
            yield from _answers(name, task, answers)


def changes_of(
    references: Sequence[str], stages: Sequence[Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Return what each reference after the first was made with that the first was not."""
    made = {
        name: list(dict.fromkeys(change for stage in stages for change in stage["changes"][index]))
        for index, name in enumerate(references)
    }
    return {name: changes for name, changes in made.items() if changes}


def _shown(score: Score | None) -> str:
    if score is None:
        return ""
    return number(score.value, digits=6) if score.low is None else score.text()


def _answers(name: str, task: Mapping[str, Any], shown: int) -> Iterator[str]:
    yield (
        f"{task['task']}: {Delta(**task['delta']).text}; of {task['total']} questions {name} "
        f"gained {task['gained']} and lost {task['lost']}; {len(task['changed'])} answers changed"
    )
    for item in task["changed"][:shown]:
        verdicts = ["right" if item[key] else "wrong" for key in ("was_right", "is_right")]
        old, new = (_cut(str(item[key])) for key in ("old", "new"))
        yield f"  {item['place']}: {old} ({verdicts[0]}) -> {new} ({verdicts[1]})"


def _cut(text: str) -> str:
    # Keep the end of a long answer: that is where its result is.
    text = " ".join(text.split())
    return text if len(text) <= _MAX_ANSWER else f"...{text[3 - _MAX_ANSWER :]}"
