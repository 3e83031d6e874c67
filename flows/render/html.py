"""Pages as one HTML file: no script, no request, light and dark, paper and small screens.

jinja2 escapes every value, and the page's own content policy forbids what escaping could miss.
"""

from pathlib import Path
from typing import Any, Protocol

import jinja2
from markupsafe import Markup

from flows.render import text

STYLE = "style.jinja"


def fill(template: Path, **values: Any) -> str:
    """A page from a template, with the style that all pages share."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    source = template.read_text(encoding="utf-8")
    return environment.from_string(source).render(
        words=text,
        drawing=_drawing,
        style=Markup(Path(__file__).with_name(STYLE).read_text(encoding="utf-8")),  # ours
        **values,
    )


class _Drawn(Protocol):
    def svg(self) -> str: ...


def _drawing(chart: _Drawn) -> Markup:
    return Markup(chart.svg())  # drawn by us, its label escaped
