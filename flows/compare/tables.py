"""Tables of a store's runs and artifacts, which DuckDB loads for SQL: see `VIEWS`.

Only the tables that a query needs are read: each artifact's manifest is an object of its own, and
steps and examples are one more file each. Missing or damaged objects are skipped and reported.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from flows.artifacts.publish import find_manifest, read_index
from flows.artifacts.runs import Run, latest_runs
from flows.artifacts.transfer import read_file
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.render.paired import scores_in
from infra.parallel import in_parallel
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

METRICS = "metrics.parquet"  # see nanochat_core.runtime.metrics
EXAMPLES = "examples.parquet"
Row: TypeAlias = dict[str, Any]
_Found = TypeVar("_Found")
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class View:
    """A table that can be queried."""

    about: str
    columns: Mapping[str, str]  # name -> SQL type
    file: str | None = None  # artifacts' file that has its rows, with more columns


_KEY = {"stage": "VARCHAR", "fingerprint": "VARCHAR"}
VIEWS: Mapping[str, View] = {
    "runs": View(
        about="one row a run",
        columns={
            **dict.fromkeys(("run", "name", "profile", "status"), "VARCHAR"),
            **{"started": "TIMESTAMP", "ended": "TIMESTAMP"},
            **{"depth": "BIGINT", "overrides": "VARCHAR[]"},
        },
    ),
    "stages": View(
        about="one row for each stage of a run; built: by this run, not taken from another",
        columns={
            **{"run": "VARCHAR", **_KEY, "built": "BOOLEAN", "created": "TIMESTAMP"},
            **{"seconds": "DOUBLE", "dollars": "DOUBLE"},
            **{"device": "VARCHAR", "processes": "BIGINT"},
        },
    ),
    "steps": View(
        about="one row for each step of a stage; `describe steps` lists its metrics too",
        columns={**_KEY, "step": "BIGINT"},
        file=METRICS,
    ),
    "evals": View(
        about="what each artifact measured; low and high: a 95 % interval",
        columns={
            **_KEY,
            **{"metric": "VARCHAR", "value": "DOUBLE", "low": "DOUBLE", "high": "DOUBLE"},
        },
    ),
    "examples": View(
        about="one row for each question of an evaluation; `describe examples` lists all columns",
        columns={**_KEY, "task": "VARCHAR", "place": "INTEGER", "correct": "BOOLEAN"},
        file=EXAMPLES,
    ),
    "artifacts": View(
        about="one row for each artifact; run: that which built it",
        columns={
            **{**_KEY, "digest": "VARCHAR", "created": "TIMESTAMP", "run": "VARCHAR"},
            **{"size": "BIGINT", "files": "BIGINT", "git_commit": "VARCHAR"},
        },
    ),
}


def read_tables(store: Store, wanted: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the `wanted` views that have rows, as pyarrow.Tables; and what was skipped."""
    problems: list[str] = []
    if not wanted:
        return {}, problems
    runs = latest_runs(store, None, unread=problems)
    tables = {"runs": _table("runs", map(_run_row, runs))}
    # Reading manifests takes a request each, so a query of `runs` alone ends here.
    if set(wanted) != {"runs"}:
        manifests = _read_manifests(store, runs, problems)
        tables["stages"] = _table("stages", _stage_rows(runs, manifests))
        tables["artifacts"] = _table("artifacts", map(_artifact_row, manifests.values()))
        evals = (row for manifest in manifests.values() for row in _eval_rows(manifest))
        tables["evals"] = _table("evals", evals)
        for name in sorted(set(wanted) & {"steps", "examples"}):
            tables[name] = _read_files(store, name, list(manifests.values()), problems)
    found = {name: table for name, table in tables.items() if table is not None}
    return found, list(dict.fromkeys(problems))


def _eval_rows(manifest: Manifest) -> Iterator[Row]:
    key = {"stage": manifest.stage, "fingerprint": manifest.fingerprint}
    for name, score in scores_in(manifest.provenance.metrics).items():
        yield {**key, "metric": name, **vars(score)}


def _read_manifests(
    store: Store, runs: Sequence[Run], problems: list[str]
) -> dict[tuple[str, str], Manifest]:
    """Read the manifests in the index and those that runs refer to, by stage and fingerprint."""
    # Both: artifacts outlive the records of their runs, and an entry of the index may be missing.
    index = read_index(store)
    keys = {(stage, fingerprint) for stage, found in index.items() for fingerprint in found}
    keys |= {item for run in runs for item in run.stages.items()}
    refs = [ArtifactRef(*key) for key in sorted(keys)]
    found = _read_each(lambda r: find_manifest(store, r) or f"{r.name} is gone", refs, problems)
    return {(manifest.stage, manifest.fingerprint): manifest for manifest in found}


def _read_files(store: Store, name: str, manifests: Sequence[Manifest], problems: list[str]) -> Any:
    """Return the rows of the artifacts' files of a view as one pyarrow.Table; None without any."""
    # Imported here: few commands read tables of steps.
    pa: Any = importlib.import_module("pyarrow")  # it has no types
    pq: Any = importlib.import_module("pyarrow.parquet")
    file = VIEWS[name].file
    assert file is not None

    def read(manifest: Manifest) -> Any:
        if (data := read_file(store, manifest, file)) is None:
            return None
        table = pq.read_table(pa.BufferReader(data))
        keys = {key: [getattr(manifest, key)] * table.num_rows for key in _KEY}
        return pa.table({**keys, **{key: table[key] for key in table.column_names}})

    found = [table for table in _read_each(read, manifests, problems) if table is not None]
    # Each stage has columns of its own. The same name may have another type: an answer is text, or
    # of a base model the number of an option.
    texts = {field.name: pa.string() for t in found for field in t.schema if field.type == "string"}
    found = [
        t.cast(pa.schema([(f.name, texts.get(f.name, f.type)) for f in t.schema])) for t in found
    ]
    return pa.concat_tables(found, promote_options="permissive") if found else None


def _read_each(
    read: Callable[[_Item], _Found | str], items: Sequence[_Item], problems: list[str]
) -> list[_Found]:
    """Return what `read` finds; what it returns as text or raises is added to the problems."""

    def attempt(item: _Item) -> _Found | str:
        try:
            return read(item)
        except ArtifactError as error:
            return str(error)

    results = list(in_parallel(attempt, items))
    problems += [result for result in results if isinstance(result, str)]
    return [result for result in results if not isinstance(result, str)]


def _table(name: str, rows: Iterable[Row]) -> Any:
    """Return rows of a view as a pyarrow.Table, NaN as null; None without rows."""
    pa: Any = importlib.import_module("pyarrow")
    if not (found := list(rows)):
        return None
    return pa.table(
        {c: pa.array([row.get(c) for row in found], from_pandas=True) for c in VIEWS[name].columns}
    )


def _run_row(run: Run) -> Row:
    names = ("run", "name", "profile", "status", "depth", "started", "ended")
    return {**{name: getattr(run, name) for name in names}, "overrides": list(run.overrides)}


def _stage_rows(
    runs: Sequence[Run], manifests: Mapping[tuple[str, str], Manifest]
) -> Iterator[Row]:
    for run in runs:
        for stage, fingerprint in run.stages.items():
            row: Row = {"run": run.run, "stage": stage, "fingerprint": fingerprint}
            if manifest := manifests.get((stage, fingerprint)):
                made = manifest.provenance
                # A reused artifact names the run that built it in its provenance.
                row |= {"built": made.run == run.run, "created": made.created}
                if made.segments:
                    row |= {"seconds": made.seconds, "dollars": made.dollars}
                    # Executions may have been on different machines: the columns name the last.
                    row |= {name: made.segments[-1].get(name) for name in ("device", "processes")}
            yield row


def _artifact_row(manifest: Manifest) -> Row:
    made = manifest.provenance
    return {
        **{name: getattr(manifest, name) for name in ("stage", "fingerprint", "digest")},
        **{"created": made.created, "run": made.run, "git_commit": made.git_commit},
        **{"size": sum(f.size for f in manifest.files), "files": len(manifest.files)},
    }
