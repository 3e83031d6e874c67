"""How commands speak: results on stdout, errors as two lines on stderr.

rich honours NO_COLOR and drops colour where the output is not a terminal; every text is chosen to
read the same without it.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from flows.render.text import escaped, one_line, visible
from nanochat_core.errors import NanochatError

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
    """A console on which no text moves the cursor, however it gets there.

    Names, hosts, reasons and errors come from the store and from jobs: others write them.
    """

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        """See Console. rich itself would drop a few of the characters without a trace."""
        return super().render_str(escaped(text), *args, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See Console: all that it writes comes through here. Segments of control are rich's."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


def screen(*, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console, the one way to a terminal.

    With `soft_wrap` lines are never broken, so that paths can be copied; tables and bars need
    `soft_wrap=False`.
    """
    return _Screen(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def print_lines(lines: Iterable[str]) -> None:
    """Print each text as one line: what comes from a store cannot pass for another line."""
    console = screen()
    for line in lines:
        console.print(one_line(line))


def print_text(text: str) -> None:
    """Print lines as they are, to the last character, but for what could move the cursor."""
    sys.stdout.write(escaped(text))


def print_note(text: str) -> None:
    """Print one line beside the results: what a command is doing."""
    screen(stderr=True).print(one_line(text))


def print_plan(lines: list[str]) -> None:
    """A plan's lines, each in the colour of the state it begins with."""
    console = screen()
    for line in lines:
        console.print(one_line(line), style=_STATE_STYLES.get(line[:2].rstrip()))


def print_json(tree: Any) -> None:
    """Print `tree` for programs."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")


def print_error(message: str, *, hint: str | None) -> None:
    """Say what is wrong and what to do about it."""
    console = screen(stderr=True)
    console.print("error:", style="bold red", end=" ")
    console.print(visible(" ".join(message.split())))
    if hint:
        console.print("hint:", style="bold cyan", end=" ")
        console.print(visible(" ".join(hint.split())))


def print_warning(message: str) -> None:
    """Say what is to be known of what the command does all the same."""
    console = screen(stderr=True)
    console.print("warning:", style="bold yellow", end=" ")
    console.print(visible(" ".join(message.split())))


def print_unread(unread: Sequence[str]) -> None:
    """Warn of records that were left out, of which each text says where it is and what is wrong."""
    if unread := list(dict.fromkeys(unread)):
        records = "1 record" if len(unread) == 1 else f"{len(unread)} records"
        print_warning(f"{records} cannot be read: {'; '.join(unread)}")


def print_mistake(error: NanochatError) -> None:
    """Show an error that a person can act on."""
    print_error(str(error), hint=error.hint)
