"""Read a table in a parquet file."""

import importlib
import io
from collections.abc import Collection
from typing import Any

from nanochat_core.errors import ArtifactError


def read_rows(data: bytes, name: object, columns: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a table, of these columns if it has them; without columns of all.

    Raises ArtifactError, with the file's `name`, if it is damaged.
    """
    # Imported here: it takes 0.2 s, and most commands read no table.
    pq: Any = importlib.import_module("pyarrow.parquet")  # it has no types
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        names: list[str] = file.schema_arrow.names
        found = [each for each in names if not columns or each in columns]
        return file.read(columns=found).to_pylist()
    except (ValueError, OSError, NotImplementedError) as error:  # bases of ArrowException's
        raise ArtifactError(f"{name} cannot be read: {error}") from error
