"""Pages of results: each one HTML file without scripts or requests, and the same as markdown.

jinja2 escapes every value but our own style and drawings, and `visible` shows what is invisible in
it. The content security policy of the template forbids scripts and requests, should an escape be
missing. In markdown, text that others wrote is in fenced blocks, where nothing has a meaning.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from flows.render.table import Cell, Table
from flows.render.text import fenced, visible
from flows.render.vega import Panel, svg

_TEMPLATE, _STYLE = (
    Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("page.html.jinja", "style.jinja")
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its answers: one of each model, or the sampled ones of a step of RL."""

    prompt: str
    answers: tuple[tuple[str, str], ...]  # (model or reward, text); "" continues the prompt
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands below it, in the order of the fields.

    A part of a text that is in backticks is code.
    """

    title: str = ""
    notes: Sequence[str] = ()
    key: Mapping[str, Mapping[str, Any]] | None = None  # by name: the style of its lines in charts
    charts: Sequence[Panel] = ()
    table: Table | None = None
    style: str = "wide cards"  # of the table on the page: its CSS classes
    samples: Sequence[Sample] = ()
    code: str = ""
    items: Sequence[str] = ()
    folded: bool = False  # on the page: only the title shows until a reader opens it

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show below the heading."""
        parts = (self.notes, self.charts, self.samples, self.code)
        return not any((*parts, self.items, self.table and self.table.rows))

    @property
    def blocks(self) -> Iterator[str]:
        """The section without its heading and charts, as markdown."""
        yield from self.notes
        if self.table and self.table.rows:
            yield self.table.markdown()
        for sample in self.samples:
            prompt = f"{sample.note}: {sample.prompt}" if sample.note else sample.prompt
            answers = [f"\n[{label}] {text}" if label else text for label, text in sample.answers]
            yield fenced("".join([prompt, *answers]))
        if self.code:
            yield fenced(self.code)
        if self.items:
            yield _list(self.items)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of results: its head, and its sections, of which empty ones are left out."""

    kind: str
    heading: str
    made: str = ""  # when and where
    lead: Sequence[str]
    tiles: Sequence[tuple[str, Cell]] = ()  # on the page alone
    summary: Sequence[str] = ()  # the page shows the last one: its tiles have the others
    sections: Sequence[Section]
    footer: str

    @property
    def html(self) -> str:
        """The page as HTML. The same content gives the same text."""
        environment = jinja2.Environment(
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,  # a misspelt name is an error, not an empty string
            keep_trailing_newline=True,
        )
        return environment.from_string(_TEMPLATE).render(
            page=self,
            style=_STYLE,
            text=visible,
            code=_code,
            position=_position,
            drawing=svg,
        )

    @property
    def markdown(self) -> str:
        """The page without sections that are charts, as markdown."""
        title = ", ".join(filter(None, (f"# {self.kind}: {self.heading}", self.made)))
        parts = [title, *self.lead, _list(self.summary)]
        for section in self.sections:
            if not section.charts and not section.is_empty:
                parts += [f"## {section.title}", *section.blocks]
        return "\n\n".join(parts) + "\n"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _code(text: str) -> Markup:
    """Return text as HTML, its parts in backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(visible(text)))))


def _position(share: float) -> str:
    """Return the CSS position of a share on a bar, clipped to the bar's ends."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"
