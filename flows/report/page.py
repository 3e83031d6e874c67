"""The report card as one HTML file, and as markdown for a terminal or Prefect's pages.

Both show the sections of a `Card`. Model output and other untrusted text is escaped in HTML, and in
markdown in fenced blocks, where nothing has a meaning.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from markupsafe import Markup, escape

from flows.render.html import fill
from flows.render.table import markdown_table
from flows.render.text import fenced
from flows.report.card import Card
from flows.report.rows import CardCell, Section

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html(card: Card) -> str:
    """Return the page. The same card gives the same text."""
    return fill(TEMPLATE, card=card, position=_position, code=_code)


def markdown(card: Card) -> str:
    """Return the card without its charts. The same card gives the same text."""
    # The first list is what `nanochat run` prints (`headline` in its module).
    title = f"# Report card: {card.name}, {card.made}"
    parts = [title, card.lead, _list(card.summary)]
    for section in card.sections:
        if not section.charts:
            parts += [f"## {section.title}", *_blocks(section)]
    return "\n\n".join(parts) + "\n"


def _blocks(section: Section) -> Iterator[str]:
    yield from section.notes
    if section.meter:
        yield "; ".join((section.meter.text, *section.meter.notes))
    if section.rows:
        yield markdown_table(section.head, [[*map(_text, row)] for row in section.rows])
    if section.facts:
        yield _list(f"{name}: {value}" for name, value in section.facts)
    for sample in section.samples:
        prompt = f"{sample.note}: {sample.prompt}" if sample.note else sample.prompt
        answers = [f"\n[{label}] {text}" if label else text for label, text in sample.answers]
        yield fenced("".join([prompt, *answers]))
    if section.code:
        yield fenced(section.code)
    if section.items:
        yield _list(section.items)


def _text(cell: CardCell) -> str:
    """Return a cell as "61.0 % (56.0 to 66.0 %, 122 of 200); +40.0 points"."""
    if not cell.text or not cell.notes:
        return cell.text or "; ".join(cell.notes)
    first, *more = cell.notes
    return "; ".join([f"{cell.text} ({first})", *more])


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _code(text: str) -> Markup:
    """Return text as HTML, its parts in backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _position(share: float) -> str:
    """Return the CSS position of a share on a bar, clipped to the bar's ends."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
