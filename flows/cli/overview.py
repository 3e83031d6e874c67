"""The list of commands, in the form of cyclopts' help, drawn without loading cyclopts and rich."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Rows: TypeAlias = Sequence[tuple[str, str]]  # name and description

_NARROWEST = 40  # columns: narrower boxes would have no room for the words
_FRAME = 4  # columns of a box's two sides
_GAP = 2  # columns between the name and the description


def overview(usage: str, about: str, panels: Iterable[tuple[str, Rows]], *, width: int) -> str:
    """Return usage, description and a box for each panel, `width` columns wide."""
    width = max(width, _NARROWEST)
    lines = [usage, "", *_wrap(about, width), ""]
    for title, rows in panels:
        lines.append(f"\u256d\u2500 {title} ".ljust(width - 1, "\u2500") + "\u256e")
        lines += [
            f"\u2502 {line:<{width - _FRAME}} \u2502" for line in _table(rows, width - _FRAME)
        ]
        lines.append("\u2570" + "\u2500" * (width - 2) + "\u256f")
    return "\n".join(lines) + "\n"


def _table(rows: Rows, width: int) -> Iterator[str]:
    indent = max(len(name) for name, _ in rows) + _GAP
    for name, text in rows:
        for number, line in enumerate(_wrap(text, width - indent)):
            yield f"{'' if number else name:<{indent}}{line}"


def _wrap(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".lstrip()
    yield line
