"""One row of the campaign's table."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one part of the campaign went under one condition."""

    part: str
    attempts: int
    got_through: tuple[str, ...]  # one line each; empty when everything held
    seconds: float
