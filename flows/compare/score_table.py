"""A comparison as tables, a row for each stage and metric, a column for each run; and as a page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

from flows.compare.compare import direction
from flows.render.charts import Chart, line_style
from flows.render.page import Page, Section
from flows.render.paired import Delta
from flows.render.table import Cell, Table, texts
from flows.render.text import listed, number, percent
from flows.stages import EVALUATORS, REPORT, STAGES

_EVALUATIONS = {stage.name for stage in EVALUATORS.values()}
_SHARES = ("pass_at_1", "pass_at_1_first", "waste")  # of stages that train or prepare data
_TITLES = {
    **{"core": "CORE", "chatcore": "ChatCORE", "pass_at_1": "pass@1"},
    **{"val_bpb": "bits per byte", "train_bpb": "training bits per byte"},
    **{"val_loss": "validation loss", "flops": "FLOPs"},
}
_MAX_NAMED = 4
_DELTA = 4  # index of the second run's difference in a row

Row: TypeAlias = Sequence[Cell]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Runs, or artifacts of a stage, and how they differ from the first."""

    names: Sequence[str]
    changes: Mapping[str, Sequence[str]]  # by name: settings and code
    # A row for each metric: stage, metric, value of the first run; value and difference of others.
    scores: Sequence[Row]
    others: Sequence[Row]  # what training and the preparation of data measured
    charts: Sequence[Chart]
    same: Sequence[str]  # titles of the stages whose artifact is the same

    @property
    def verdicts(self) -> list[str]:
        """Which scores are better and worse, a line for each run after the first."""
        if not (self.scores or self.others or self.charts or self.same or self.changes):
            return ["nothing that they made measured anything"]
        first, *others = self.names
        return [
            f"{name} against {first}: {_verdict(self.scores, _DELTA + 2 * index)}"
            for index, name in enumerate(others)
            if self.scores
        ]

    def differences(self, shown: int | None = None) -> list[str]:
        """Return the settings and code that differ, a line for each run with `shown` of them."""
        return [
            f"{name} differs from {self.names[0]} in {listed(found, shown or len(found))}"
            for name, found in self.changes.items()
        ]

    @property
    def same_artifacts(self) -> str:
        """The stages whose artifact is the same, as one line."""
        return f"the same artifact: {', '.join(self.same)}"

    def table(self, title: str, rows: Sequence[Row]) -> Table:
        """Return the table of `rows`, whose metrics are called `title`."""
        first, *others = self.names
        pairs = (word for name in others for word in (name, "difference"))
        return Table(columns=texts("stage", title, first, *pairs), rows=rows, key=1)


def _verdict(rows: Sequence[Row], column: int) -> str:
    """Return which scores are better and worse, by the differences in this column."""
    parts: list[str] = []
    for verdict in ("better", "worse"):
        # The last model first: it is what a run is for.
        found = [f"{row[0]} {row[1]}" for row in reversed(rows) if row[column].tone == verdict]
        if found:
            parts.append(f"{len(found)} {verdict} ({listed(found, _MAX_NAMED)})")
    if rest := sum(row[column].tone == "unclear" for row in rows):
        parts.append(f"{rest} without a significant difference")
    return ", ".join(parts) or "no score in common"


def stage_title(name: str) -> str:
    """Return a stage's name for people: an evaluation has that of the model that it evaluates."""
    stage = next((stage for stage in STAGES if stage.name == name), None)
    model = stage.inputs[0] if stage and name in _EVALUATIONS else stage
    return (model and model.label) or name.replace("_", " ")


def _metric_title(name: str) -> str:
    base = name.removesuffix("_first")
    title = _TITLES.get(base, base.replace("_", " "))
    return title if base == name else f"{title} at step 0"


def score_rows(stages: Iterable[Mapping[str, Any]], *, evaluated: bool) -> Iterator[Row]:
    """Yield the rows of `stages` as `nanochat compare --json` has them.

    evaluated: of evaluations; False means of the stages that train or prepare data.
    """
    for name, scores in ((stage["stage"], stage["scores"]) for stage in stages):
        if name == REPORT.name or (name in _EVALUATIONS) != evaluated:
            continue
        for score in scores:
            cells: list[Mapping[str, Any] | None] = score["of"]
            # Counts such as rows and ranks are of interest where they differ.
            values = [cell and cell["value"] for cell in cells]
            if len(set(values)) > 1 or any(cell and cell["low"] is not None for cell in cells):
                metric = score["metric"]
                is_mean = metric in ("core", "chatcore") or metric.endswith("bpb")
                is_share = (evaluated and not is_mean) or metric in _SHARES
                pairs = [_cells(metric, cell, is_share=is_share) for cell in cells]
                head = Cell(stage_title(name)), Cell(_metric_title(metric))
                yield *head, pairs[0][0], *chain(*pairs[1:])


def _cells(metric: str, cell: Mapping[str, Any] | None, *, is_share: bool) -> tuple[Cell, Cell]:
    """Return a run's value of a metric, and its difference from the first with the verdict."""
    if cell is None:
        return Cell(""), Cell("")
    decimals = None if cell["low"] is None else 3 if metric == "chatcore" else 4
    shown = percent if is_share else _number if decimals is None else f"{{:.{decimals}f}}".format
    value = Cell(shown(cell["value"]))
    if "delta" not in cell:
        return value, Cell("")
    delta = Delta(**{name: cell["delta"][name] for name in ("value", "low", "high")})
    if delta.value == 0 and delta.low is None:
        text = "same"
    elif is_share:
        text = delta.points
    elif decimals is None:
        text = f"{'-' if delta.value < 0 else '+'}{_number(abs(delta.value))}"
    else:
        text = delta.text(decimals=decimals)
    verdict = "better" if delta.value * direction(metric) > 0 else "worse"
    clear = Cell(f"{text} {verdict}", tone=verdict)
    return value, clear if delta.is_clear else Cell(text, tone="unclear")


def _number(value: float) -> str:
    return number(int(value) if value.is_integer() else value)


_FOOTER = """Differences are from the first. A coloured one is larger than other questions of the
same kind would explain (95 %); another seed of training may still. A curve is a moving average."""


def page_of(compared: Compared) -> str:
    """Return a comparison as HTML. The same numbers give the same text."""
    training = Section(
        title="Training",
        key={name: line_style(index) for index, name in enumerate(compared.names)},
        charts=[chart.panel for chart in compared.charts],
        table=compared.table("training", compared.others),
    )
    same = [compared.same_artifacts] if compared.same else []
    return Page(
        kind="Compared",
        heading=listed(compared.names, _MAX_NAMED),
        lead=compared.verdicts,
        sections=[
            Section(table=compared.table("score", compared.scores)),
            Section(title="What differs", items=[*compared.differences(), *same]),
            training,
        ],
        footer=_FOOTER,
    ).html
