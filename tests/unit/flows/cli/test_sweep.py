"""`nanochat sweep`: its plan, and what it refuses."""

import pytest

from tests.support.flows.terminal import Terminal

VARY = ("--vary", "optimizer.muon_lr=0.01,0.03")


def test_the_plan_has_every_run_and_shared_stages_once_a_seed(terminal: Terminal) -> None:
    tree = terminal.read("sweep", "tiny", *VARY, "--seeds", "1,2", "--plan", "--gpus", "0")

    stages = [(stage["stage"], stage["members"]) for stage in tree["stages"]]
    assert ("rows", ["base s1", "p1 s1", "p2 s1"]) in stages
    assert [members for stage, members in stages if stage == "pretrain"] == [
        [f"{point} s{seed}"] for seed in (1, 2) for point in ("base", "p1", "p2")
    ]


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ((), "no setting is varied", "--vary optimizer.muon_lr=0.01,0.03"),
        ((*VARY, "--seeds", "1,x"), "--seeds is '1,x'", "--seeds 42,43,44"),
        (("--vary", "optimizer.muon_l=1"), "no setting 'optimizer.muon_l'", "muon_lr"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("store")
def test_a_mistake_is_answered_in_two_lines(
    terminal: Terminal, words: tuple[str, ...], error: str, hint: str
) -> None:
    said, remedy = terminal.fails("sweep", "tiny", *words)

    assert error in said
    assert hint in remedy
