"""`nanochat miniseries`: its plan, what it refuses, and pictures of what the store has."""

from pathlib import Path

import pytest

from infra.storage.base import Store
from tests.support.flows.measured_series import put_evaluated
from tests.support.flows.terminal import Terminal


@pytest.fixture
def evaluated(store: Store) -> Store:
    """Three depths of tiny."""
    for depth, bpb in ((1, 3.0), (2, 2.6), (4, 2.3)):
        put_evaluated(store, depth, bpb)
    return store


def test_the_plan_for_programs_has_every_stage(terminal: Terminal) -> None:
    tree = terminal.read("miniseries", "tiny", "--depths", "1,2", "--plan", "--gpus", "0")

    assert [(s["stage"], s["depths"]) for s in tree["stages"]][4:7] == [
        ("rows", [1, 2]),
        ("pretrain", [1]),
        ("pretrain", [2]),
    ]
    assert tree["seconds"] > 0


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["tiny"], "no depths are given", "--depths 2,3,4,6"),
        (["tiny", "--depths", "2,two"], "--depths is '2,two'", "--depths 2,3,4,6"),
        (["tiny", "--depths", "2"], "1 depth, expected 2 to 12", "--depths"),
        (["tinny", "--depths", "1,2"], "there is no profile 'tinny'", "did you mean 'tiny'?"),
        (["tiny", "--depths", "1,2", "--set", "foo=1"], "there is no setting 'foo'", "nearest"),
        (["tiny", "--plot-only"], "has no runs called tiny-d1", "nanochat miniseries tiny"),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_mistake_is_answered_in_two_lines(
    terminal: Terminal, words: list[str], error: str, hint: str
) -> None:
    said, remedy = terminal.fails("miniseries", *words)

    assert error in said
    assert hint in remedy


@pytest.mark.usefixtures("evaluated")
def test_a_picture_is_made_again_of_what_the_store_has(terminal: Terminal, tmp_path: Path) -> None:
    lines = terminal.said("miniseries", "tiny", "--plot-only")

    assert [line.split()[0] for line in lines[:4]] == ["depth", "d1", "d2", "d4"]
    assert any(line.startswith("d6 would be") for line in lines)
    directory = tmp_path / "home" / "miniseries" / "tiny"
    assert lines[-3:] == [
        f"page     {directory / 'series.html'}",
        f"picture  {directory / 'series.png'}",
        f"numbers  {directory / 'series.json'}",
    ]
    assert (directory / "series.png").exists()


@pytest.mark.usefixtures("evaluated")
def test_only_the_depths_that_are_asked_for_are_points(terminal: Terminal) -> None:
    tree = terminal.read("miniseries", "tiny", "--plot-only", "--depths", "1,4,5")

    assert [point["depth"] for point in tree["points"]] == [1, 4]
    assert [missing["depth"] for missing in tree["missing"]] == [5]


@pytest.mark.usefixtures("evaluated")
def test_another_name_is_another_series(terminal: Terminal, evaluated: Store) -> None:
    put_evaluated(evaluated, 3, 2.5, name="mine")

    tree = terminal.read("miniseries", "tiny", "--plot-only", "--name", "mine")
    assert [point["depth"] for point in tree["points"]] == [3]
