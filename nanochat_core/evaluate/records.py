"""Write the samples and example tables of an evaluation, for people and for the report."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write `records` as JSON lines, ASCII, keys in the given order."""
    with path.open("w", encoding="ascii", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def write_samples(path: Path, prompts: Iterable[str], texts: Iterable[str]) -> None:
    """Write the text that the model answered to each prompt."""
    write_records(
        path, ({"prompt": p, "text": text} for p, text in zip(prompts, texts, strict=True))
    )


def write_table(path: Path, records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write `records` as parquet with the columns of `schema`. Equal records give equal bytes.

    A lone surrogate, which a dataset's text may contain, becomes "?".
    """
    rows = [{name: _whole(record[name]) for name in schema.names} for record in records]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        # Parquet's strings are UTF-8, which cannot encode it.
        return value.encode("utf-8", errors="replace").decode("utf-8")
    return value
