"""Tables: aligned text for terminals, rows for HTML and Prefect's pages, and markdown."""

import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Row: TypeAlias = Sequence[str]


_GAP = "  "  # between two columns
_CONTINUED = "    "  # before what did not fit into a row's line
_MIN_WRAPPED = 20  # columns: in fewer than that, words are not wrapped


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text below a head; a page colours cells that end in better or worse."""

    head: Row
    rows: Sequence[Row]
    right: Collection[int] = ()  # indices of right-aligned columns
    name: int = 0  # index of the column that names the rows

    def lines(self, *, width: int | None) -> list[str]:
        """Return the table for a terminal of this width: see `columns`."""
        return columns([self.head, *self.rows], right=self.right, width=width)

    def tree(self) -> list[dict[str, str]]:
        """Return the rows by the names of their columns, for Prefect's pages."""
        return [dict(zip(self.head, row, strict=True)) for row in self.rows]


def columns(
    rows: Sequence[Row],
    *,
    right: Collection[int] = (),
    indent: str = "",
    width: int | None = None,
) -> list[str]:
    """Return rows as lines with aligned columns; `right` has the indices of right-aligned ones.

    Columns that end beyond `width` are not aligned, and continued below a row that is too long.
    None means that there is no limit.
    """
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    ends = [len(indent) + sum(widths[: n + 1]) + n * len(_GAP) for n in range(len(widths))]

    def pad(index: int, cell: str) -> str:
        return cell.rjust(widths[index]) if index in right else cell.ljust(widths[index])

    def lines_of(row: Sequence[str]) -> Iterator[str]:
        limit = len(row) if width is None else max(1, sum(end <= width for end in ends))
        head = indent + _GAP.join(pad(index, cell) for index, cell in enumerate(row[:limit]))
        rest = _GAP.join(filter(None, row[limit:]))
        # Aligned if there is room for that, else on one line, else continued below it.
        for start in (head, head.rstrip()):
            if width is None or not rest or len(start + _GAP + rest) <= width:
                yield (start + _GAP + rest).rstrip()
                return
        yield head.rstrip()
        yield from textwrap.wrap(
            rest,
            max(width, len(indent) + _MIN_WRAPPED),
            initial_indent=indent + _CONTINUED,
            subsequent_indent=indent + _CONTINUED,
            break_long_words=False,
            break_on_hyphens=False,
        )

    return [line for row in cells for line in lines_of(row)]


def markdown_table(head: Row, rows: Sequence[Row]) -> str:
    """Return a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    # A pipe inside a cell would begin another column, a newline another row.
    return text.replace("|", "\\|").replace("\n", " ")
