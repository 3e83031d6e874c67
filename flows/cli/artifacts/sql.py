"""`nanochat sql`: query all runs of a store with SQL."""

import json
import math
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
    from flows.compare.query import columns_in, query_store
    from flows.compare.tables import VIEWS

    store = place.open_store()
    known: Any
    if query is None:
        known, problems = columns_in(store)
    else:
        # Not as a pyarrow.Table, with another interval, and a decimal as a sum of integers.
        known, problems = query_store(store, query, lambda it: (it.columns, it.fetchall()))
    for problem in problems:
        print_warning(f"skipped: {problem}")
    if query is None:
        tree: Any = {name: {"about": VIEWS[name].about, "columns": known[name]} for name in VIEWS}
        lines = (line for name in VIEWS for line in _view_lines(name, **tree[name]))
        return print_result(lambda: tree, lines, as_json=as_json)
    head, rows = known
    # Cut here and not by LIMIT in SQL, so that the number of the other rows is known.
    shown = rows[:limit] if limit else rows
    table = Table(columns=texts(*head), rows=[[*map(_cell, row)] for row in shown])
    more = ["", f"{len(rows) - len(shown)} more rows; --limit 0 shows all"]
    print_result(
        lambda: [dict(zip(head, map(_plain, row), strict=True)) for row in shown],
        [table if rows else "no rows", *(more if len(shown) < len(rows) else [])],
        as_json=as_json,
    )


def _view_lines(view: str, *, about: str, columns: list[str]) -> list[str]:
    """Return a view and its columns as lines."""
    import textwrap

    indent = "    "
    text = textwrap.wrap(", ".join(columns), 96, initial_indent=indent, subsequent_indent=indent)
    return [f"{view}: {about}", *text]


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
