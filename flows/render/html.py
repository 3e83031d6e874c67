"""Fill HTML templates: each page is one file without scripts or requests, for screen and paper.

jinja2 escapes every value. The content security policy in each template forbids scripts and
requests, should an escape be missing.
"""

import functools
import uuid
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from flows.render import text
from flows.render.vega import Drawable, svg
from nanochat_core.job import move_into_place

STYLE = "style.jinja"


def fill(template: Path, **values: Any) -> str:
    """Return a page from a template, with the style shared by all pages."""
    return _compile(template.read_text(encoding="utf-8")).render(
        words=text,
        drawing=_drawing,
        style=Markup(
            Path(__file__).with_name(STYLE).read_text(encoding="utf-8")
        ),  # our file: not escaped
        **values,
    )


@functools.cache
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,  # a misspelt name is an error, not an empty string
        keep_trailing_newline=True,
    )
    return environment.from_string(source)


def write_whole(path: Path, data: bytes) -> None:
    """Write a page or a picture so that a reader sees all of it, or the older one."""
    if path.exists() and not path.is_file():  # a device, a pipe: it is written to, never replaced
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _drawing(chart: Drawable) -> Markup:
    return Markup(svg(chart))  # our own SVG, whose label is escaped
