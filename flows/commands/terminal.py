"""How commands speak: results on stdout, errors as two lines on stderr.

rich honours NO_COLOR and drops colour where the output is not a terminal; every text is chosen to
read the same without it.
"""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from flows.report_text import visible
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


def screen() -> Console:
    """A console on stdout. Lines are never broken, so that paths can be copied."""
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


def print_lines(lines: Iterable[str]) -> None:
    """Print text that may come from a store, which others write to: it cannot move the cursor."""
    console = screen()
    for line in lines:
        console.print(visible(line))


def print_plan(lines: list[str]) -> None:
    """A plan's lines, each in the colour of the state it begins with."""
    console = screen()
    for line in lines:
        console.print(line, style=_STATE_STYLES.get(line[:2].rstrip()))


def print_json(tree: Any) -> None:
    """Print `tree` for programs."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")


def print_error(message: str, *, hint: str | None) -> None:
    """Say what is wrong and what to do about it."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print("error:", style="bold red", end=" ")
    console.print(visible(" ".join(message.split())))
    if hint:
        console.print("hint:", style="bold cyan", end=" ")
        console.print(visible(" ".join(hint.split())))


def print_warning(message: str) -> None:
    """Say what is to be known of what the command does all the same."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print("warning:", style="bold yellow", end=" ")
    console.print(visible(" ".join(message.split())))


def print_mistake(error: NanochatError) -> None:
    """Show an error that a person can act on."""
    print_error(str(error), hint=error.hint)
