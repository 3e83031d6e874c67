"""`nanochat compare`: numbers side by side, differences with intervals, answers that changed."""

import itertools
import math

import pytest

from flows.compare.compare import Answers, Score, delta_of, mcnemar, paired_interval
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.measured import put_measured
from tests.support.flows.shelf import put_run
from tests.support.flows.terminal import Terminal


def judged(store: Store, seed: int, right: list[bool]) -> Manifest:
    share = sum(right) / len(right)
    return put_measured(
        store,
        "base_eval",
        config={"seed": seed},
        metrics={
            "sums": share,
            "sums_low": share - 0.1,
            "sums_high": share + 0.1,
            "val_bpb": 1.0 + seed / 8,
        },
        examples=[
            {
                "task": "sums",
                "place": i,
                "answer": f"{seed if is_right else 'no'}",
                "correct": is_right,
            }
            for i, is_right in enumerate(right)
        ],
    )


@pytest.fixture
def runs(store: Store) -> list[Manifest]:
    """The second answers 30 of 100 questions right that the first does not, and loses 5."""
    model = put_measured(store, "pretrain", metrics={"val_bpb": 1.5})
    first = judged(store, 0, [i < 40 for i in range(100)])
    second = judged(store, 1, [5 <= i < 70 for i in range(100)])
    put_run(store, "one", model, first, name="one")
    put_run(store, "two", model, second, name="two")
    return [first, second]


def test_scores_stand_side_by_side_with_what_changed(runs: list[Manifest], terminal: Terminal):
    lines = terminal.said("compare", "one", "two")
    assert lines[0].startswith("pretrain: the same artifact, ")
    assert lines[2:] == [
        "base_eval  one                 two",
        "sums       0.4 (0.3 to 0.5)    0.65 (0.55 to 0.75)  +0.25 (+0.1398 to +0.3499) *",
        "val_bpb    1                   1.125                +0.125",
        "",
        "sums: of 100 questions two gained 30 and lost 5; 70 answered otherwise than by one",
    ]


def test_changed_answers_are_printed_when_asked_for(runs: list[Manifest], terminal: Terminal):
    lines = terminal.said("compare", "base_eval@one", "base_eval@two", "--answers", "2")
    assert lines[-2:] == ["  0: 0 (right) -> no (wrong)", "  1: 0 (right) -> no (wrong)"]


def test_for_programs_there_are_all_of_them(runs: list[Manifest], terminal: Terminal):
    tree = terminal.read("compare", "one", "two", "one")
    stage = tree["stages"][1]
    sums = stage["scores"][0]
    assert sums["metric"] == "sums"
    assert sums["of"][1]["delta"]["clear"]
    assert sums["of"][2]["delta"]["value"] == 0
    assert not sums["of"][2]["delta"]["clear"]
    [task] = stage["answers"][1]
    assert (task["gained"], task["lost"], task["total"]) == (30, 5, 100)
    assert len(task["changed"]) == 70
    assert tree["stages"][0]["same"]


def test_a_run_that_lacks_a_stage_has_no_numbers_there(
    runs: list[Manifest], store: Store, terminal: Terminal
):
    put_run(store, "three", name="three")
    tree = terminal.read("compare", "one", "three", "two")
    [pretrain, base_eval] = tree["stages"]
    assert not pretrain["same"]
    assert base_eval["scores"][0]["of"][1] is None
    assert base_eval["scores"][0]["of"][2]["delta"]["clear"]
    assert base_eval["answers"][1] == []
    tree = terminal.read("compare", "three", "one")
    assert all(
        "delta" not in (cell or {}) for s in tree["stages"] for r in s["scores"] for cell in r["of"]
    )


def test_pairs_narrow_the_interval_of_a_difference():
    old, new = Score(value=0.4, low=0.3, high=0.5), Score(value=0.65, low=0.55, high=0.75)
    apart = delta_of(old, new, None)
    pairs = Answers(task="sums", total=100, kept=40, gained=25, lost=0, changed=())
    paired = delta_of(old, new, pairs)
    assert apart.low is not None
    assert paired.low is not None
    assert paired.low > apart.low > 0
    other = Answers(
        task="sums", total=100, kept=40, gained=1, lost=0, changed=()
    )  # not of this number
    assert delta_of(old, new, other) == apart
    assert not delta_of(old, Score(value=0.4, low=None, high=None), None).is_clear


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ([], "nothing to compare is given", "nanochat compare main mine"),
        (["one"], "1 of them is given, expected two or more", "nanochat compare main mine"),
        (["one", "base_eval@two"], "one is a run and base_eval@two is an artifact", "sft@one"),
        (["base_eval@two", "one"], "one is a run and base_eval@two is an artifact", "sft@one"),
        (
            ["base_eval@one", "pretrain@two"],
            "of different stages: base_eval, pretrain",
            "one stage",
        ),
        (["one", "nobody"], "nobody", ""),
        (["one", "two", "--answers", "-1"], "--answers is -1", "at least 0"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    runs: list[Manifest], terminal: Terminal, words: list[str], said: str, hint: str
):
    error, told = terminal.fails("compare", *words)
    assert said in error
    assert hint in told


def test_what_measured_nothing_is_said(store: Store, terminal: Terminal):
    put_run(store, "a", put_measured(store, "shards"), name="a")
    assert terminal.said("compare", "a", "a") == ["nothing that they made measured anything"]


# Intervals of pairs.


def test_the_interval_of_pairs_is_the_published_one():
    low, high = paired_interval(50, 36, 2, 12)  # Newcombe 1998, his example, method 10
    assert (round(low, 4), round(high, 4)) == (-0.3404, -0.0569)
    for kept, gained, lost in ((0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 0, 0)):
        low, high = paired_interval(1, kept, gained, lost)
        assert -1 <= low <= gained - lost <= high <= 1
        assert high - low > 0.9  # one question says next to nothing


@pytest.mark.parametrize(
    "shares",  # of questions kept, gained, lost and never right
    [
        (0.45, 0.05, 0.05, 0.45),
        (0.8, 0.03, 0.02, 0.15),
        (0.3, 0.1, 0.01, 0.59),
        (0.3, 0.15, 0.05, 0.5),
        (0.05, 0.2, 0.0, 0.75),
    ],
)
def test_a_difference_lies_in_its_interval_95_times_of_100(shares: tuple[float, ...]):
    total, inside, clear = 20, 0.0, 0.0
    for kept, gained, lost in itertools.product(range(total + 1), repeat=3):
        if (neither := total - kept - gained - lost) < 0:
            continue
        counts = (kept, gained, lost, neither)
        ways = math.factorial(total) // math.prod(map(math.factorial, counts))
        share = ways * math.prod(p**n for p, n in zip(shares, counts, strict=True))
        low, high = paired_interval(total, kept, gained, lost)
        inside += share * (low <= shares[1] - shares[2] <= high)
        clear += share * (mcnemar(gained, lost) < 0.05)
    assert inside > 0.94
    assert shares[1] != shares[2] or clear < 0.05  # nothing is found where nothing is


def test_few_changed_answers_are_no_clear_difference():
    few = Answers(task="sums", total=30, kept=9, gained=4, lost=0, changed=()).delta
    assert (few.p, few.is_clear) == (0.125, False)
    assert not Answers(task="sums", total=1, kept=0, gained=1, lost=0, changed=()).delta.is_clear
    assert Answers(task="sums", total=30, kept=9, gained=6, lost=0, changed=()).delta.is_clear
    assert (mcnemar(0, 0), mcnemar(5, 5), mcnemar(2, 12)) == (1.0, 1.0, mcnemar(12, 2))
    assert mcnemar(2, 12) == pytest.approx(0.01293945)
    assert mcnemar(0, 5000) == 0.0  # too small for a float


# Questions that are not the same.


def asked(store: Store, seed: int, *, suite: str | None, prompt: str = "1 + 1?") -> Manifest:
    """Of two tasks, the prompt of the second one given."""
    return put_measured(
        store,
        "chat_eval_sft",
        config={"seed": seed},
        metrics={"sums": seed / 2, "words": seed / 2},
        examples=[
            {"task": task, "place": 0, "prompt": text, "answer": str(seed), "correct": seed > 0}
            for task, text in (("sums", "say a"), ("words", prompt))
        ],
        scores={"suite": suite},
    )


def test_answers_to_another_suite_are_not_paired(store: Store, terminal: Terminal):
    for number, suite in enumerate(("a" * 64, "b" * 64, "a" * 64)):
        put_run(store, f"r{number}", asked(store, number, suite=suite), name=f"r{number}")
    lines = terminal.said("compare", "r0", "r1", "r2")
    assert lines[-3] == (
        "r1 was not asked what r0 was: their suites are aaaaaaaaaaaa and bbbbbbbbbbbb"
    )
    assert lines[-2].startswith("sums: of 1 questions r2 gained 1")
    [stage] = terminal.read("compare", "r0", "r1", "r2")["stages"]
    assert [len(tasks) for tasks in stage["answers"]] == [0, 0, 2]
    assert [bool(reason) for reason in stage["not_paired"]] == [False, True, False]


def test_a_question_with_another_text_is_not_the_same_question(store: Store, terminal: Terminal):
    for number, prompt in enumerate(("1 + 1?", "1 + 2?")):
        put_run(store, f"r{number}", asked(store, number, suite=None, prompt=prompt), name="r")
    lines = terminal.said("compare", "r0", "r1")
    assert lines[-2:] == [
        "r1 was not asked what r0 was: the questions differ in words",
        "sums: of 1 questions r1 gained 1 and lost 0; 1 answered otherwise than by r0",
    ]
