"""`nanochat miniseries`: its plan, and what it refuses."""

import pytest

from tests.support.flows.terminal import Terminal


def test_the_plan_for_programs_has_every_stage(terminal: Terminal) -> None:
    tree = terminal.read("miniseries", "tiny", "--depths", "1,2", "--plan", "--gpus", "0")

    assert [(s["stage"], s["depths"]) for s in tree["stages"]][4:7] == [
        ("rows", [1, 2]),
        ("pretrain", [1]),
        ("pretrain", [2]),
    ]
    assert tree["seconds"] > 0


def test_it_is_a_sweep_over_the_depth(terminal: Terminal) -> None:
    sweep = ("--vary", "model.depth=1,2", "--stage", "base_eval", "--reduction", "1")

    one = terminal.read("miniseries", "tiny", "--depths", "1, 2", "--plan", "--gpus", "0")
    other = terminal.read("sweep", "tiny", *sweep, "--seeds", "42", "--plan", "--gpus", "0")
    assert one == other


@pytest.mark.usefixtures("store")
def test_the_depths_are_required(terminal: Terminal) -> None:
    assert terminal.fails("miniseries", "tiny")[0] == "no setting is varied"


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["tiny", "--depths", "2,two"], "--depths is '2,two'", "--depths 2,3,4,6"),
        (["tiny", "--depths", "2"], "every point has the settings of the base", "another value"),
        (["tiny", "--depths", "0,2"], "depth 0 is not between 1 and 100", "layers"),
        (["tinny", "--depths", "1,2"], "there is no profile 'tinny'", "did you mean 'tiny'?"),
        (["tiny", "--depths", "1,2", "--set", "foo=1"], "there is no setting 'foo'", "nearest"),
        (["tiny", "--depths", "1,2", "--set", "seed=1"], "seed is set", "--seeds 7,8,9"),
        (["tiny", "--depths", "1,2", "--reduction", "3"], "of its own", "model.depth=1,2"),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_mistake_is_answered_in_two_lines(
    terminal: Terminal, words: list[str], error: str, hint: str
) -> None:
    said, remedy = terminal.fails("miniseries", *words)

    assert error in said
    assert hint in remedy
