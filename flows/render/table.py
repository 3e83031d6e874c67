"""A table, as aligned text, as markdown and as rows for Prefect's pages."""

from collections.abc import Collection, Sequence
from typing import TypeAlias

Row: TypeAlias = Sequence[str]


def columns(rows: Sequence[Row], *, right: Collection[int] = (), indent: str = "") -> list[str]:
    """Return rows as lines with aligned columns; `right` has the indices of right-aligned ones."""
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def pad(index: int, cell: str) -> str:
        return cell.rjust(widths[index]) if index in right else cell.ljust(widths[index])

    return [indent + "  ".join(pad(*item) for item in enumerate(row)).rstrip() for row in cells]


def markdown_table(head: Row, rows: Sequence[Row]) -> str:
    """Return a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    # A pipe inside a cell would begin another column, a newline another row.
    return text.replace("|", "\\|").replace("\n", " ")
