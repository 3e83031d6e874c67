"""Build charts as Vega-Lite specifications, and draw them as SVG: in a page, or as a picture.

Colours are CSS variables, so that one drawing serves light, dark and printed pages; a picture has
the light ones in their place.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

Layer: TypeAlias = dict[str, Any]

# c0 to c5 are the colours of several runs in one chart.
_STYLE = Path(__file__).with_name("style.jinja").read_text(encoding="utf-8")
LIGHT = dict(re.findall(r"--(\w+): (#\w+);", _STYLE.partition("}")[0]))
COLOURS = {name: f"var(--{name})" for name in LIGHT}  # Vega writes them unchanged


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart: layers on one pair of axes. Later layers are drawn over earlier ones."""

    title: str
    caption: str
    layers: Sequence[Layer]
    width: int  # of the plot area without labels, in CSS pixels
    height: int
    # Room for labels in a page: left, right, top, bottom. It is fixed, so that the bytes of the
    # drawing do not depend on the fonts of the machine.
    padding: Mapping[str, int]
    stops: str = ""  # the steps from which the job resumed


def layer(
    values: Iterable[Mapping[str, Any]], mark: str, style: Mapping[str, Any], **channels: Any
) -> Layer:
    """Return marks of one kind, one for each of `values` (for a line, one through all of them)."""
    return {"data": {"values": list(values)}, "mark": {"type": mark, **style}, "encoding": channels}


def channel(field: str, *, scale: Mapping[str, Any], **axis: Any) -> dict[str, Any]:
    """Return the encoding of a number on an axis."""
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def svg(panel: Panel) -> str:
    """Return a chart for a page as SVG without ids, scripts and fonts of its own."""
    padding = panel.padding
    drawing = _draw(
        {"layer": panel.layers, "width": panel.width, "height": panel.height},
        font="inherit",
        padding=padding,
        autosize={"type": "none"},
        background="transparent",
    )
    # Replace Vega's opening tag, which has a fixed size: with a viewBox alone the page scales it.
    body = drawing[drawing.index(">") + 1 :]
    width = panel.width + padding["left"] + padding["right"]
    height = panel.height + padding["top"] + padding["bottom"]
    name = escape(f"{panel.title}: {panel.caption}", quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{body}'


def picture_url(panels: Iterable[Panel]) -> str:
    """Return charts in colours of LIGHT, each below its title, side by side, as an address.

    The address holds the picture as SVG: Prefect's server has no place for files. Takes 0.4 s, the
    first time 1.6 s. Two charts are 15 to 50 kB.
    """
    content = [
        {
            "title": {"text": panel.title, "subtitle": panel.caption},
            **{"layer": panel.layers, "width": panel.width, "height": panel.height},
        }
        for panel in panels
    ]
    background = COLOURS["card"]
    drawing = _draw({"hconcat": content}, font="sans-serif", padding=12, background=background)
    drawing = re.sub(r"var\(--(\w+)\)", lambda name: LIGHT.get(name[1], name[0]), drawing)
    # A tenth of a pixel is enough in tags; the text between them is shown.
    drawing = re.sub("<[^>]*>", lambda tag: re.sub(r"(\.\d)\d+", r"\1", tag[0]), drawing)
    return "data:image/svg+xml," + quote(drawing, safe="/:;,=()'")


def _draw(content: Mapping[str, Any], *, font: str, **settings: Any) -> str:
    import vl_convert  # 30 MB: only what draws loads it

    muted, line = COLOURS["muted"], COLOURS["line"]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **content,
        **settings,
        "config": {
            "aria": False,  # the page's <svg> has one label; Vega would add one for every mark
            "font": font,
            "view": {"stroke": None},
            "title": {
                **{"anchor": "start", "offset": 10, "color": COLOURS["ink"], "fontSize": 14},
                **{"subtitleColor": muted, "subtitleFontSize": 12},
            },
            "axis": {
                **{"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal"},
                **{"gridColor": line, "domainColor": line, "tickColor": line},
                **{"labelFontSize": 12, "titleFontSize": 12},
            },
        },
    }
    return vl_convert.vegalite_to_svg(spec)
