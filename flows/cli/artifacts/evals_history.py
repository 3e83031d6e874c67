"""`nanochat evals history`: list the values of a score over time."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.options import AsJson, Positive, StoreOptions
from flows.cli.output import print_result
from flows.identity.ref import short
from flows.render.table import columns

if TYPE_CHECKING:  # duckdb is slow to import, and every command imports this module
    from flows.evals.history import Entry, History


def history(
    name: Annotated[
        str,
        Parameter(help="A tag or a run's name, or a stage of one (sft@main, pretrain@main)."),
    ],
    /,
    *,
    metric: Annotated[
        str | None,
        Parameter(
            help="core, chatcore, val_bpb or a task's name; default chatcore, core or val_bpb."
        ),
    ] = None,
    limit: Annotated[Positive, Parameter(help="Evaluations that are shown at most.")] = 20,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Show how a score went, the latest first, with 95 % intervals.

    Each change is from the evaluation before, if that asked the same; * marks a clear one.
    """
    from flows.evals.history import read_metric

    found = read_metric(place.open_store(), name, metric=metric, limit=limit)
    print_result(lambda: _tree(name, found), _lines(name, found), as_json=as_json)
    return 0


def _tree(name: str, found: "History") -> dict[str, Any]:
    evaluations: list[dict[str, Any]] = []
    for entry in found.entries:
        run, delta = entry.evaluation.run, entry.delta
        evaluations.append(
            {
                **{"run": run.run, "started": run.started, "model": entry.evaluation.model},
                **{"evaluation": entry.evaluation.manifest.fingerprint, **asdict(entry.score)},
                "delta": delta and {**asdict(delta), "clear": delta.is_clear},
                "same": entry.is_same,
            }
        )
    facts = {"name": name, "stage": found.stage, "metric": found.metric, "more": found.more}
    return {**facts, "evaluations": evaluations}


def _lines(name: str, found: "History") -> Iterator[str]:
    from flows.render.text_charts import scale_of, strip

    # One scale for all rows, intervals included, so that the strips can be compared.
    scores = [entry.score for entry in found.entries]
    low, high = scale_of([n for s in scores for n in (s.value, s.low, s.high)])
    rows = [["started", "run", "model", found.metric, "change", f"{low:.4g} to {high:.4g}"]]
    for entry in found.entries:
        run, score = entry.evaluation.run, entry.score
        # Newest first: the last entry is the first ever, unless --limit cut some.
        is_first = entry is found.entries[-1] and not found.more
        drawn = strip(score.value, (score.low, score.high), low=low, high=high)
        about = [score.text(), _change(entry, is_first=is_first), drawn]
        rows.append([run.started, run.run, short(entry.evaluation.model), *about])
    yield f"{found.metric} of {name}, evaluated by {found.stage}"
    yield ""
    yield from columns(rows)
    if found.more:
        yield ""
        yield f"{found.more} more before; --limit shows them"


def _change(entry: "Entry", *, is_first: bool) -> str:
    delta = entry.delta
    if entry.is_same:
        return "the same evaluation"
    if delta is None:
        return "" if is_first else "asked otherwise before"
    return delta.text
