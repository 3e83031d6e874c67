"""The rows of the report card, which `page` renders as HTML and as markdown.

Every string is text for people, in which `visible` has shown what is invisible; a part in
backticks is code.
"""

from dataclasses import dataclass

from flows.render.charts import Chart


@dataclass(frozen=True)
class CardCell:
    """A value with its notes. A bar is drawn below it if it has positions: shares, 0 to 1."""

    text: str
    notes: tuple[str, ...] = ()
    tone: str = ""  # "better" or "worse"
    span: tuple[float, float] | None = None  # a shaded part of the bar
    at: float | None = None  # the position of the value
    mark: float | None = None  # that of what it is compared with


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its answers: one of each model, or the sampled ones of a step of RL."""

    prompt: str
    answers: tuple[tuple[str, str], ...]  # (model or reward, text); "" continues the prompt
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands below it, in the order of the fields."""

    title: str
    notes: tuple[str, ...] = ()
    meter: CardCell | None = None
    head: tuple[str, ...] = ()
    rows: tuple[tuple[CardCell, ...], ...] = ()  # of a table; the first cell names the row
    style: str = "cards"  # of the table on the page: its CSS classes
    right: tuple[str, ...] = ()  # the columns of numbers, by their heads
    facts: tuple[tuple[str, str], ...] = ()
    charts: tuple[Chart, ...] = ()  # on the page alone
    samples: tuple[Sample, ...] = ()
    code: str = ""
    items: tuple[str, ...] = ()
    folded: bool = False  # on the page: only the title shows until a reader opens it


def cells(*texts: str) -> tuple[CardCell, ...]:
    """Return a row of cells without notes."""
    return tuple(map(CardCell, texts))
