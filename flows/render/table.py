"""Tables: one object for terminals of any width, pages, markdown and Prefect's pages."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flows.render.text import visible

_GAP = "  "  # between two columns
_CONTINUED = "    "  # before what did not fit into a row's line
_MIN_WRAPPED = 20  # columns: in fewer than that, words are not wrapped

Paint: TypeAlias = Callable[[str, str], str]  # of a text and its tone: the text in colour


def _plain(text: str, tone: str) -> str:
    return text


@dataclass(frozen=True)
class Cell:
    """A value with its notes. On a page a bar is drawn below it if it has positions, 0 to 1."""

    text: str
    notes: tuple[str, ...] = ()
    tone: str = ""  # "better", "worse", or the sign of a state: what decides the colour
    span: tuple[float, float] | None = None  # a shaded part of the bar
    at: float | None = None  # the position of the value
    mark: float | None = None  # that of what it is compared with

    def __str__(self) -> str:
        """Return the cell as "61.0 % (56.0 to 66.0 %, 122 of 200); +40.0 points"."""
        if not self.text or not self.notes:
            return self.text or "; ".join(self.notes)
        first, *more = self.notes
        return "; ".join([f"{self.text} ({first})", *more])


@dataclass(frozen=True)
class Column:
    """A column: its name, and how its cells are shown."""

    name: str
    right: bool = False  # aligned right, as numbers are


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells in named columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Cell]]
    key: int = 0  # index of the column that names the rows
    head: bool = True  # False: a terminal shows no names
    indent: str = ""  # of lines

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows as cells."""
        return [
            [cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows
        ]

    def lines(self, *, width: int | None = None, paint: Paint = _plain) -> list[str]:
        """Return aligned lines; none without rows. Text is escaped: others may have written it.

        Columns that end beyond `width` are not aligned, and continued below a row that is too long.
        None means that there is no limit.
        """
        head = [[Cell(column.name) for column in self.columns]]
        shown = [*(head if self.head and self.rows else []), *self.cells]
        rows = [
            [Cell(" ".join(visible(str(c)).split()), tone=c.tone) for c in row] for row in shown
        ]
        widths = [max(len(cell.text) for cell in column) for column in zip(*rows, strict=True)]
        return [line for row in rows for line in self._lines_of(row, widths, width, paint)]

    def _lines_of(
        self, row: Sequence[Cell], widths: Sequence[int], width: int | None, paint: Paint
    ) -> Iterator[str]:
        ends = [len(self.indent) + sum(widths[: n + 1]) + n * len(_GAP) for n in range(len(row))]
        limit = len(row) if width is None else max(1, sum(end <= width for end in ends))
        rest = [cell for cell in row[limit:] if cell.text]
        more = _GAP.join(cell.text for cell in rest)
        plain, head = (self._aligned(row[:limit], widths, each) for each in (_plain, paint))
        # Aligned if there is room for that, else on one line, else continued below it.
        for start, line in ((plain, head), (plain.rstrip(), head.rstrip())):
            if width is None or not rest or len(start + _GAP + more) <= width:
                yield _GAP.join([line, *(paint(cell.text, cell.tone) for cell in rest)]).rstrip()
                return
        yield head.rstrip()
        yield from textwrap.wrap(
            more,
            max(width, len(self.indent) + _MIN_WRAPPED),
            initial_indent=self.indent + _CONTINUED,
            subsequent_indent=self.indent + _CONTINUED,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _aligned(self, row: Sequence[Cell], widths: Sequence[int], paint: Paint) -> str:
        cells: list[str] = []
        for cell, width, column in zip(row, widths, self.columns, strict=False):
            space = " " * (width - len(cell.text))
            text = paint(cell.text, cell.tone)
            cells.append(space + text if column.right else text + space)
        return self.indent + _GAP.join(cells)

    def markdown(self) -> str:
        """Return the table in markdown."""
        head = [column.name for column in self.columns]
        lines = [head, ["---"] * len(head), *([*map(str, row)] for row in self.rows)]
        return "\n".join("| " + " | ".join(map(_escape, line)) + " |" for line in lines)

    def tree(self) -> list[dict[str, str]]:
        """Return the rows by the names of their columns, for Prefect's pages."""
        names = [column.name for column in self.columns]
        return [
            dict(zip(names, (visible(str(cell)) for cell in row), strict=True)) for row in self.rows
        ]


def texts(*names: str) -> tuple[Column, ...]:
    """Return columns of text."""
    return tuple(map(Column, names))


def numbers(*names: str) -> tuple[Column, ...]:
    """Return columns of numbers, which are aligned right."""
    return tuple(Column(name, right=True) for name in names)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return an indented table of names and values, without a head."""
    return Table(columns=texts("name", "value"), rows=list(rows), head=False, indent="  ")


def _escape(text: str) -> str:
    # A pipe inside a cell would begin another column, a newline another row.
    return visible(text).replace("|", "\\|").replace("\n", " ")
