"""Build charts as Vega-Lite specifications, and draw them as SVG: in a page, or as a picture.

In a page colours are CSS variables, so that one drawing serves light, dark and printed pages; a
picture has the light ones.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, TypeAlias

Layer: TypeAlias = dict[str, Any]
Colours: TypeAlias = Mapping[str, str]

# As in style.jinja; c0 to c5 are the colours of several runs in one chart.
LIGHT: Colours = {
    **{"card": "#ffffff", "ink": "#1d2125", "muted": "#667078", "line": "#e4e2dc"},
    **{"accent": "#17697f", "faint": "#b5d3da", "mark": "#c2691a"},
    **{"c0": "#17697f", "c1": "#c2691a", "c2": "#6a51a3", "c3": "#2c7a4b"},
    **{"c4": "#b2306b", "c5": "#667078"},
}
IN_PAGE: Colours = {name: f"var(--{name})" for name in LIGHT}  # Vega writes them unchanged


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


class Drawable(Protocol):
    """A chart that can be drawn."""

    def panel(self, colours: Colours) -> Panel:
        """Return the chart in these colours."""
        ...


def layer(
    values: Iterable[Mapping[str, Any]], mark: str, style: Mapping[str, Any], **channels: Any
) -> Layer:
    """Return marks of one kind, one for each of `values` (for a line, one through all of them)."""
    return {"data": {"values": list(values)}, "mark": {"type": mark, **style}, "encoding": channels}


def channel(field: str, *, scale: Mapping[str, Any], **axis: Any) -> dict[str, Any]:
    """Return the encoding of a number on an axis."""
    return {"field": field, "type": "quantitative", "scale": scale, "axis": axis}


def svg(chart: Drawable) -> str:
    """Return a chart in colours of IN_PAGE as SVG without ids, scripts and fonts of its own."""
    panel = chart.panel(IN_PAGE)
    padding = panel.padding
    spec = _spec(
        {"layer": panel.layers, "width": panel.width, "height": panel.height},
        IN_PAGE,
        padding=padding,
        autosize={"type": "none"},
        background="transparent",
    )
    import vl_convert  # 30 MB: only what draws loads it

    drawing = vl_convert.vegalite_to_svg(spec)
    # Replace Vega's opening tag, which has a fixed size: with a viewBox alone the page scales it.
    body = drawing[drawing.index(">") + 1 :]
    width = panel.width + padding["left"] + padding["right"]
    height = panel.height + padding["top"] + padding["bottom"]
    name = escape(f"{panel.title}: {panel.caption}", quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{body}'


def picture(charts: Iterable[Drawable]) -> str:
    """Return charts in colours of LIGHT, each below its title, side by side as one SVG."""
    import vl_convert

    panels = [
        {
            "title": {"text": panel.title, "subtitle": panel.caption},
            **{"layer": panel.layers, "width": panel.width, "height": panel.height},
        }
        for panel in (chart.panel(LIGHT) for chart in charts)
    ]
    spec = _spec({"hconcat": panels}, LIGHT, padding=12, background=LIGHT["card"])
    # A tenth of a pixel is enough in tags; the text between them is shown.
    drawing = vl_convert.vegalite_to_svg(spec)
    return re.sub("<[^>]*>", lambda tag: re.sub(r"(\.\d)\d+", r"\1", tag[0]), drawing)


def _spec(content: Mapping[str, Any], colours: Colours, **settings: Any) -> dict[str, Any]:
    muted, line = colours["muted"], colours["line"]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **content,
        **settings,
        "config": {
            "aria": False,  # the page's <svg> has one label; Vega would add one for every mark
            "font": "inherit" if colours is IN_PAGE else "sans-serif",
            "view": {"stroke": None},
            "title": {
                **{"anchor": "start", "offset": 10, "color": colours["ink"], "fontSize": 14},
                **{"subtitleColor": muted, "subtitleFontSize": 12},
            },
            "axis": {
                **{"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal"},
                **{"gridColor": line, "domainColor": line, "tickColor": line},
                **{"labelFontSize": 12, "titleFontSize": 12},
            },
        },
    }
