"""`nanochat compare`: numbers side by side, differences with intervals, answers that changed."""

import pytest

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
    assert lines == [
        "two differs from one in seed 0 -> 1",
        "",
        "base_eval  one                 two",
        "sums       0.4 (0.3 to 0.5)    0.65 (0.55 to 0.75)  +0.25 (+0.1398 to +0.3499) *",
        "val_bpb    1                   1.125                +0.125",
        "",
        "sums: +0.25 (+0.1398 to +0.3499) *; of 100 questions two gained 30 and lost 5; "
        "70 answers changed",
        "the same artifact: pretrain",
    ]


def test_changed_answers_are_printed_when_asked_for(runs: list[Manifest], terminal: Terminal):
    lines = terminal.said("compare", "base_eval@one", "base_eval@two", "--answers", "2")
    assert lines[-2:] == ["  0: 0 (right) -> no (wrong)", "  1: 0 (right) -> no (wrong)"]


def test_for_programs_there_are_all_of_them(runs: list[Manifest], terminal: Terminal):
    tree = terminal.read("compare", "one", "two", "one")
    [stage, same] = tree["stages"]
    sums = stage["scores"][0]
    assert sums["metric"] == "sums"
    assert sums["of"][1]["delta"]["clear"]
    assert sums["of"][2]["delta"]["value"] == 0
    assert not sums["of"][2]["delta"]["clear"]
    [task] = stage["answers"][1]
    assert (task["gained"], task["lost"], task["total"]) == (30, 5, 100)
    assert len(task["changed"]) == 70
    assert same["same"]
    assert stage["changes"] == [[], ["seed 0 -> 1"], []]


def test_a_run_that_lacks_a_stage_has_no_numbers_there(
    runs: list[Manifest], store: Store, terminal: Terminal
):
    put_run(store, "three", name="three")
    tree = terminal.read("compare", "one", "three", "two")
    [base_eval, pretrain] = tree["stages"]
    assert not pretrain["same"]
    assert base_eval["scores"][0]["of"][1] is None
    assert base_eval["scores"][0]["of"][2]["delta"]["clear"]
    assert base_eval["answers"][1] == []
    tree = terminal.read("compare", "three", "one")
    assert all(
        "delta" not in (cell or {}) for s in tree["stages"] for r in s["scores"] for cell in r["of"]
    )


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ([], "compare needs at least two", "nanochat compare main mine"),
        (["one"], "compare needs at least two", "nanochat compare main mine"),
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
    assert lines[-2].startswith("sums: +1 (")
    assert "; of 1 questions r2 gained 1" in lines[-2]
    [stage] = terminal.read("compare", "r0", "r1", "r2")["stages"]
    assert [len(tasks) for tasks in stage["answers"]] == [0, 0, 2]
    assert [bool(reason) for reason in stage["not_paired"]] == [False, True, False]


def test_a_question_with_another_text_is_not_the_same_question(store: Store, terminal: Terminal):
    for number, prompt in enumerate(("1 + 1?", "1 + 2?")):
        put_run(store, f"r{number}", asked(store, number, suite=None, prompt=prompt), name="r")
    lines = terminal.said("compare", "r0", "r1")
    assert lines[-2:] == [
        "r1 was not asked what r0 was: the questions differ in words",
        "sums: +1 (-0.1221 to +1); of 1 questions r1 gained 1 and lost 0; 1 answers changed",
    ]
