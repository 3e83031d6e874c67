"""`nanochat sql`: query all runs of a store with SQL."""

import json
import math
from itertools import chain
from typing import Annotated, Any, cast

from cyclopts import Parameter

from flows.cli.options import AsJson, NotNegative, StoreOptions
from flows.cli.output import print_result, print_warning
from flows.render.table import Table, texts

_MAX_CELL = 64  # characters of a value in a table


def sql(
    query: Annotated[str | None, Parameter(name="QUERY")] = None,
    /,
    *,
    limit: NotNegative = 1000,
    place: StoreOptions = StoreOptions(),
    as_json: AsJson = False,
) -> None:
    """Ask all runs of the store with SQL: runs, stages, steps, evals, examples, artifacts.

    For example: nanochat sql "select run, metric, value, low, high from stages join evals using
    (stage, fingerprint) where metric = 'core' order by value desc"

    Args:
        query: One select, in DuckDB's dialect. Default: list the columns.
        limit: Rows that are printed at most; 0 for all.
    """
    from flows.compare.query import query_store
    from flows.compare.tables import VIEWS

    if query is None:
        columns = {n: [f"{c} {k.lower()}" for c, k in v.columns.items()] for n, v in VIEWS.items()}
        tree = {n: {"about": view.about, "columns": columns[n]} for n, view in VIEWS.items()}
        pairs = ((f"{n}: {v.about}", f"    {', '.join(columns[n])}") for n, v in VIEWS.items())
        return print_result(lambda: tree, chain.from_iterable(pairs), as_json=as_json)
    # Not as a pyarrow.Table, with another interval, and a decimal as a sum of integers.
    (head, rows), problems = query_store(
        place.open_store(), query, lambda it: (it.columns, it.fetchall())
    )
    for problem in problems:
        print_warning(f"skipped: {problem}")
    # Cut here and not by LIMIT in SQL, so that the number of the other rows is known.
    shown = rows[:limit] if limit else rows
    table = Table(columns=texts(*head), rows=[[*map(_cell, row)] for row in shown])
    more = ["", f"{len(rows) - len(shown)} more rows; --limit 0 shows all"]
    print_result(
        lambda: [dict(zip(head, map(_plain, row), strict=True)) for row in shown],
        [table if rows else "no rows", *(more if len(shown) < len(rows) else [])],
        as_json=as_json,
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    # str values are shown without quotes, and so are dates, which _plain makes strings.
    text = value if isinstance(value, str) else json.dumps(_plain(value)).strip('"')
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 3]}..."
