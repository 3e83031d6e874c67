"""Files of one JSON object a line: what an evaluation leaves for people and for the report."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write `records`, one a line, ASCII, keys in the order given."""
    with path.open("w", encoding="ascii", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
