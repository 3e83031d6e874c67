"""A stage's curves, as a picture."""

from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from flows.render.charts import charts_of
from flows.render.vega import COLOURS, LIGHT, Panel, channel, layer, picture_url
from nanochat_core.runtime.metrics import rows_of


def step(number: int, **values: float) -> dict[str, Any]:
    return {"time": 0.0, "kind": "step", "step": number, "total": 400, "values": values}


def evaluation(number: int, **values: float) -> dict[str, Any]:
    return {"time": 0.0, "kind": "eval", "step": number, "values": values}


def test_a_known_stage_shows_its_own_quantities_in_their_order():
    events = [evaluation(0, val_bpb=4.0), step(1, loss=6.0, tokens_per_second=9.0)]
    events += [step(2, loss=5.0, tokens_per_second=9.0), evaluation(2, val_bpb=3.0)]
    shown = charts_of("pretrain", events)
    assert [(chart.quantity.title, chart.curves) for chart in shown] == [
        ("Pretraining loss", [[(1, 6.0), (2, 5.0)]]),
        ("Pretraining val_bpb", [[(0, 4.0), (2, 3.0)]]),
    ]


def test_what_is_no_number_is_no_point():
    [chart] = charts_of("sft", [step(1, loss=1.0), step(2, loss=float("nan"))])[:1]
    assert chart.curves == [[(1, 1.0)]]
    foreign: list[Any] = [None, "2", True]
    assert charts_of("sft", [step(n, loss=value) for n, value in enumerate(foreign)])[0].curves == [
        []
    ]
    assert charts_of("rows", [step(1), step(2)]) == []


def test_steps_that_were_done_again_are_shown_as_they_came_out_last():
    earlier = [step(1, loss=9.0), step(2, loss=8.0), step(3, loss=7.0)]
    chart = charts_of("sft", [*earlier, step(3, loss=3.0), step(4, loss=2.0)])[0]
    [points] = chart.curves
    assert points == [(1, 9.0), (2, 8.0), (3, 3.0), (4, 2.0)]
    logged = [{**event, "time": 1.0} for event in [*earlier, step(3, loss=3.0), step(4, loss=2.0)]]
    assert points == [(row["step"], row["loss"]) for row in rows_of(logged)]  # as metrics.parquet


def test_a_text_that_looks_like_a_colour_stays_as_it_is():
    axis = channel("step", scale={}, title="var(--x)")
    layers = [layer([{"step": 1}], "point", {"color": COLOURS["accent"]}, x=axis)]
    panel = Panel(title="a", caption="b", layers=layers, width=100, height=100, padding={})
    drawing = unquote(picture_url([panel]))
    assert "var(--x)" in drawing
    assert LIGHT["accent"] in drawing


def test_the_picture_is_a_small_drawing_in_its_own_address():
    many = [step(i, loss=7.0 - i / 100 + i % 7) for i in range(1, 5000)]
    many += [evaluation(i, val_bpb=4 - i / 5000) for i in range(0, 5000, 500)]
    url = picture_url(chart.panel for chart in charts_of("pretrain", many))
    head, _, data = url.partition(",")
    assert head == "data:image/svg+xml"
    assert not set(data) & set(' "#<>')  # an address as it is
    drawing = ElementTree.fromstring(unquote(data))
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "bits per byte" in unquote(data)
    assert 5_000 < len(url) < 60_000
