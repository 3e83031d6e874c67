"""Printing for commands: results on stdout; errors, warnings and notes on stderr.

rich honours NO_COLOR and drops colour where the output is not a terminal, so no text may depend on
its colour.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from flows.render.text import escaped, one_line, visible
from nanochat_core.errors import NanochatError

# By the sign that a plan's line begins with: `flows.plan.plan.STATES`.
_STATE_STYLES = {
    "=": "green",
    "+": "cyan",
    "~": "yellow",
    ">": "cyan",
    "!": "magenta",
    "?": "dim",
    "x": "red",
}


class _Screen(Console):
    """A console that escapes control characters in all text, so that none moves the cursor.

    Names, hosts, reasons and errors come from the store and from jobs, so other people write them.
    """

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        """Return `text` rendered; see Console."""
        # Before rich sees it: rich drops a few control characters silently.
        return super().render_str(escaped(text), *args, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of `renderable`; see Console. All output passes through here."""
        # Control segments (cursor, erase line) are made by rich itself for its progress bars.
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


def screen(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console. All output to a terminal goes through one of these.

    With `soft_wrap` lines are never broken, so that paths can be copied; tables and bars need
    `soft_wrap=False`.
    """
    return _Screen(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def print_lines(lines: Iterable[str]) -> None:
    """Print each text as one line; newlines in it are escaped, so that it cannot fake a line."""
    console = screen()
    for line in lines:
        console.print(one_line(line))


def print_text(text: str) -> None:
    """Print lines unchanged, but for control characters that could move the cursor."""
    # Not by rich, which would expand tabs.
    sys.stdout.write(escaped(text))


def print_note(text: str) -> None:
    """Print one line on stderr: what the command is doing."""
    screen(stderr=True).print(one_line(text))


def print_plan(lines: list[str]) -> None:
    """Print a plan's lines, each in the colour of the state it begins with."""
    console = screen()
    for line in lines:
        console.print(one_line(line), style=_STATE_STYLES.get(line[:2].rstrip()))


def print_json(tree: Any) -> None:
    """Print `tree` for programs."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")


def print_result(tree: Callable[[], Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print a command's result, for programs or for people; only what is printed is made."""
    if as_json:
        print_json(tree())
    else:
        print_lines(lines)


def print_error(message: str, *, hint: str | None) -> None:
    """Print `error:` and `hint:`, one line each, on stderr. None means there is no hint."""
    _print_labelled("error:", "bold red", message)
    if hint:
        _print_labelled("hint:", "bold cyan", hint)


def print_warning(message: str) -> None:
    """Print one `warning:` line on stderr; the command continues."""
    _print_labelled("warning:", "bold yellow", message)


def _print_labelled(label: str, style: str, text: str) -> None:
    console = screen(stderr=True)
    console.print(label, style=style, end=" ")
    console.print(visible(" ".join(text.split())))


def print_unread(unread: Sequence[str]) -> None:
    """Warn of skipped records. Each text has the record's key and what is wrong with it."""
    if unread := list(dict.fromkeys(unread)):
        records = "1 record" if len(unread) == 1 else f"{len(unread)} records"
        print_warning(f"{records} cannot be read: {'; '.join(unread)}")


def print_mistake(error: NanochatError) -> None:
    """Print an error that the user can act on."""
    print_error(str(error), hint=error.hint)
