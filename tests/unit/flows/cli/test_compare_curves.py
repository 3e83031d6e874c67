"""`nanochat compare`: curves of training below each other, and as a page."""

import re
from pathlib import Path

import pytest

from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import put_run
from tests.support.flows.terminal import Terminal


def trained(store: Store, seed: int, *, steps: int = 48) -> Manifest:
    """A model whose loss falls from 5 by 0.1 a step and more with the seed."""
    rows = [{"step": i + 1, "loss": 5.0 - i / 10 - seed / 2, "mfu": 0.4} for i in range(steps)]
    rows[-1]["val_bpb"] = 1.0 - seed / 8
    rows[0]["val_bpb"] = 3.0
    return put_measured(store, "pretrain", config={"seed": seed}, steps=rows)


@pytest.fixture
def runs(store: Store) -> None:
    for seed, name in enumerate(("one", "two")):
        put_run(store, name, trained(store, seed), name=name)
    put_run(store, "short", trained(store, 2, steps=24), name="short")
    put_run(store, "bare", put_measured(store, "pretrain", config={"seed": 9}), name="bare")


@pytest.mark.usefixtures("runs")
def test_curves_stand_below_each_other_on_one_scale(terminal: Terminal):
    lines = terminal.said("compare", "one", "two", "short", "bare")
    at = lines.index("Pretraining loss, steps 1 to 48, -0.2 to 5")
    names = [line.split()[0] for line in lines[at + 1 : at + 5]]
    curves = [line.split()[1] for line in lines[at + 1 : at + 5]]
    assert names == ["one", "two", "short", "bare"]
    assert {len(curve) for curve in curves} == {48}
    assert curves[0][0] == "\u2588"
    assert curves[1][-1] == "\u2581"
    # Two is half a point below one throughout, and short ends in the middle.
    assert all(lower <= upper for upper, lower in zip(curves[0], curves[1], strict=True))
    assert curves[2][24:] == "\u00b7" * 24
    assert lines[at + 1].split()[2:] == ["0.3"]
    assert lines[at + 4].split() == ["bare", "\u00b7" * 48, "not", "recorded"]
    assert "Pretraining val_bpb, steps 1 to 48, 0.75 to 3" in lines


@pytest.mark.usefixtures("runs")
def test_the_same_artifact_needs_no_curves(terminal: Terminal):
    assert terminal.said("compare", "one", "one")[0] == "nothing that they made measured anything"


@pytest.mark.usefixtures("runs")
def test_for_programs_there_are_the_points(terminal: Terminal):
    [stage] = terminal.read("compare", "one", "bare")["stages"]
    loss, bpb = stage["curves"]
    assert loss["metric"] == "loss"
    assert loss["of"][0][:2] == [[1, 5.0], [2, 4.9]]
    assert loss["of"][1] == []
    assert bpb["of"][0] == [[1, 3.0], [48, 1.0]]


@pytest.mark.usefixtures("runs")
def test_a_page_holds_scores_and_curves_and_nothing_else(terminal: Terminal, tmp_path: Path):
    path = tmp_path / "page.html"
    lines = terminal.said("compare", "one", "two", "--html", str(path))
    assert lines[-1] == str(path)
    page = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"<(script|iframe|object|embed|form|link|base)\b|@import|url\(", page)
    assert "Pretraining loss" in page
    assert page.count("<figure>") == 2
    assert page.count('stroke="var(--c1)"') >= 2
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".page")] == []
    terminal.said("compare", "one", "two", "--html", str(path))
    assert path.read_text(encoding="utf-8") == page


@pytest.mark.usefixtures("runs")
def test_a_page_that_cannot_be_written_is_a_mistake(terminal: Terminal, tmp_path: Path):
    path = tmp_path / "nowhere" / "page.html"
    error, hint = terminal.fails("compare", "one", "two", "--html", str(path))
    assert "nowhere/page.html cannot be written: no such file or directory" in error
    assert "--html" in hint
    (tmp_path / "folder").mkdir()
    device = tmp_path / "device"
    device.symlink_to("/dev/full")
    error, _ = terminal.fails("compare", "one", "two", "--html", str(device))
    assert "no space left on device" in error
    assert device.is_symlink()
    error, _ = terminal.fails("compare", "one", "two", "--html", str(tmp_path / "folder"))
    assert "folder cannot be written: is a directory" in error
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_curve_with_no_finite_value_is_none(store: Store, terminal: Terminal):
    rows = [{"step": i, "loss": float("nan")} for i in range(1, 4)]
    for name in ("one", "two"):
        made = put_measured(store, "sft", config={"seed": name}, steps=rows, metrics={"steps": 3})
        put_run(store, name, made, name=name)
    lines = terminal.said("compare", "one", "two")
    assert lines[0] == 'two differs from one in seed "one" -> "two"'
    assert not any("SFT loss" in line for line in lines)
