"""One row of the campaign's table."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one part of the campaign went under one condition."""

    part: str
    attempts: int
    got_through: tuple[str, ...]  # one line each; empty when everything held
    seconds: float


def row(part: str, attempts: int, got_through: Iterable[str], *, began: float) -> Row:
    """Return the row of a part that began at this moment (time.monotonic()) and ends now."""
    through, seconds = tuple(got_through), time.monotonic() - began
    return Row(part=part, attempts=attempts, got_through=through, seconds=seconds)


def row_of(part: str, outcome: Mapping[str, str], *, began: float) -> Row:
    """Return the row of attempts that give what got through by their names, "" for nothing."""
    through = [f"{name}: {what}" for name, what in outcome.items() if what]
    return row(part, len(outcome), through, began=began)
