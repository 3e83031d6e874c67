"""metrics.parquet: a job's events as a table, one row per step, for DuckDB and dataframes.

It is written from events.jsonl at the end of a job, next to it among the artifact's logs: it holds
times, so it is no part of the artifact's identity. Columns:

    step      int64
    time      double, unix seconds at which the step was logged; null if it was only evaluated
    seconds   double, since the execution that did it began its loop; null likewise
    ...       double, a column for every value of step and eval events: loss, val_bpb, mfu, ...
"""

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanochat_core.job import Job
from nanochat_core.runtime.progress import read_events

FILE = "metrics.parquet"


def write_metrics(job: Job) -> Path | None:
    """Write the table, if the job logged steps; return its path. Never fails the job."""
    try:
        rows = rows_of(read_events(job.events)) if job.events.exists() else []
        return _write(job.directory / FILE, rows) if rows else None
    except Exception as error:  # noqa: BLE001 - the result is more than its table
        sys.stderr.write(f"{FILE} was not written: {error}\n")
        return None


def rows_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each step. For steps repeated after a resume the last event counts."""
    rows: dict[int, dict[str, Any]] = {}
    began: float | None = None
    for event in events:
        if event["kind"] == "start":
            began = event["time"]
        if event["kind"] not in ("step", "eval"):
            continue
        row = rows.setdefault(event["step"], {"step": event["step"], "time": None, "seconds": None})
        # rl logs the duration of a step as "seconds", a column of its own meaning here.
        row.update({"step_seconds" if k == "seconds" else k: v for k, v in event["values"].items()})
        if event["kind"] == "step":
            row["time"] = event["time"]
            row["seconds"] = event["time"] - (began if began is not None else event["time"])
    return [rows[step] for step in sorted(rows)]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow as pa  # imported late: it takes 0.2 s, and most jobs in tests write no table
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    schema = pa.schema([(n, pa.int64() if n == "step" else pa.float64()) for n in names])
    # Renamed when complete, as the job may be killed at any time.
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
    temporary.replace(path)
    return path
