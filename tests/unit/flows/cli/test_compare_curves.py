"""`nanochat compare`: curves of training below each other, and as a page."""

import re

import pytest

from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import put_run


def trained(store, seed, *, steps=48):
    """A model whose loss falls from 5 by 0.1 a step and more with the seed."""
    rows = [{"step": i + 1, "loss": 5.0 - i / 10 - seed / 2, "mfu": 0.4} for i in range(steps)]
    rows[-1]["val_bpb"] = 1.0 - seed / 8
    rows[0]["val_bpb"] = 3.0
    return put_measured(store, "pretrain", config={"seed": seed}, steps=rows)


@pytest.fixture
def runs(store):
    for seed, name in enumerate(("one", "two")):
        put_run(store, name, trained(store, seed), name=name)
    put_run(store, "short", trained(store, 2, steps=24), name="short")
    put_run(store, "bare", put_measured(store, "pretrain", config={"seed": 9}), name="bare")


@pytest.mark.usefixtures("runs")
def test_curves_stand_below_each_other_on_one_scale(terminal):
    lines = terminal.shows("compare one two short bare")
    at = lines.index("Pretraining loss, steps 1 to 48, -0.2 to 5")
    one, two = (line.split()[1] for line in lines[at + 1 : at + 3])
    # Two is half a point below one throughout.
    assert all(lower <= upper for upper, lower in zip(one, two, strict=True))
    assert terminal.said("compare", "one", "one")[0] == "nothing that they made measured anything"


@pytest.mark.usefixtures("runs")
def test_for_programs_there_are_the_points(terminal):
    [stage] = terminal.read("compare", "one", "bare")["stages"]
    loss, bpb = stage["curves"]
    assert loss["metric"] == "loss"
    assert loss["of"][0][:2] == [[1, 5.0], [2, 4.9]]
    assert loss["of"][1] == []
    assert bpb["of"][0] == [[1, 3.0], [48, 1.0]]


@pytest.mark.usefixtures("runs")
def test_a_page_holds_scores_and_curves_and_nothing_else(terminal, tmp_path):
    words = ("compare", "one", "two", "--html", str(path := tmp_path / "page.html"))
    assert terminal.said(*words)[-1] == str(path)
    page = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|iframe|object|embed|form|link|base)\b|@import|url\(", page)
    assert "Pretraining loss" in page
    assert page.count("<figure>") == 2
    assert page.count('stroke="var(--c1)"') >= 2
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".page")] == []
    terminal.said(*words)
    assert path.read_text(encoding="utf-8") == page


@pytest.mark.usefixtures("runs")
def test_a_page_that_cannot_be_written_is_a_mistake(terminal, tmp_path):
    (tmp_path / "folder").mkdir()
    device = tmp_path / "device"
    device.symlink_to("/dev/full")
    for path in (tmp_path / "nowhere" / "page.html", device, tmp_path / "folder"):
        terminal.refuses("compare", "one", "two", "--html", str(path))
    assert device.is_symlink()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_curve_with_no_finite_value_is_none(store, terminal):
    rows = [{"step": i, "loss": float("nan")} for i in range(1, 4)]
    for name in ("one", "two"):
        made = put_measured(store, "sft", config={"seed": name}, steps=rows, metrics={"steps": 3})
        put_run(store, name, made, name=name)
    terminal.shows("compare one two")
