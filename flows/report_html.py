"""The report card as one HTML file: no script, no request, light and dark, paper and small screens.

jinja2 escapes every value, and the page's own content policy forbids what escaping could miss.
"""

from pathlib import Path

import jinja2
from markupsafe import Markup

from flows import report_text
from flows.report_card import CHAT_MODELS, VOCABULARIES, Card
from flows.report_charts import Chart

TEMPLATE = "report.html.jinja"


def render(card: Card) -> str:
    """The page. The same card gives the same text."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    source = Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8")
    template = environment.from_string(source)
    return template.render(
        card=card,
        models=CHAT_MODELS,
        vocabularies=VOCABULARIES,
        words=report_text,
        drawing=_drawing,
    )


def _drawing(chart: Chart) -> Markup:
    return Markup(chart.svg())  # drawn by us, its label escaped
