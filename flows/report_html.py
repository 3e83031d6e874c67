"""The report card as one HTML file: no script, no request, light and dark, paper and small screens.

jinja2 escapes every value, and the page's own content policy forbids what escaping could miss.
"""

from pathlib import Path
from typing import Any, Protocol

import jinja2
from markupsafe import Markup

from flows import report_text
from flows.report_card import VOCABULARIES, Card
from flows.report_scores import CHAT_MODELS, GPT2_CORE

TEMPLATE = "report.html.jinja"
STYLE = "report_style.jinja"


def render(card: Card) -> str:
    """The page. The same card gives the same text."""
    return fill(
        TEMPLATE,
        card=card,
        models=CHAT_MODELS,
        vocabularies=VOCABULARIES,
        gpt2_core=GPT2_CORE,
        place=_place,
    )


def fill(template: str, **values: Any) -> str:
    """A page from a template of this package, with the style that all of them share."""
    here = Path(__file__)
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    source = here.with_name(template).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        words=report_text,
        drawing=_drawing,
        style=Markup(here.with_name(STYLE).read_text(encoding="utf-8")),  # ours
        **values,
    )


def _place(share: float) -> str:
    """Where on a bar from 0 to 1 something is; what is beyond an end is shown at it."""
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


class _Drawn(Protocol):
    def svg(self) -> str: ...


def _drawing(chart: _Drawn) -> Markup:
    return Markup(chart.svg())  # drawn by us, its label escaped
