"""Turns about numbers: what they ask, and what is in tests alone."""

import itertools
import random
import re

import pytest

from tasks.base import is_final_number, text_of
from tasks.generated import arithmetic, sums

MANY = 2000


def turns(make, split="train"):
    rng = random.Random(0)
    return [make(split, rng) for _ in range(MANY)]


def answer(turn):
    return text_of(turn["messages"][1]["content"])


def calls(turn):
    content = turn["messages"][1]["content"]
    return [(a["text"], b["text"]) for a, b in itertools.pairwise(content) if a["type"] == "python"]


def test_sums_have_two_or_three_numbers_up_to_999_and_all_three_signs():
    found = turns(sums.sum_turn)
    assert all(is_final_number(turn, answer(turn)) for turn in found)
    terms = [re.findall(r"\d+", calls(turn)[0][0]) for turn in found]
    assert {len(numbers) for numbers in terms} == {2, 3}
    assert sum(len(numbers) == 3 for numbers in terms) > MANY / 10
    assert max(int(n) for numbers in terms for n in numbers) > 900
    assert all(0 <= int(turn["answer"]) <= sums.LARGEST * 10 for turn in found)
    assert {s for turn in found for s in re.findall(r"[-+*]", calls(turn)[0][0])} == {*"+-*"}


def test_half_of_the_claims_are_true_and_the_answer_says_which():
    found = turns(sums.truth_turn)
    for turn in found:
        [(_, difference)] = calls(turn)
        right, wrong = (sums.TRUE, sums.FALSE)[:: 1 if difference == "0" else -1]
        assert answer(turn).endswith(right)
        assert sums.is_true(turn, right)
        assert not sums.is_true(turn, wrong)
    assert 0.4 < sum(turn["answer"] == "True" for turn in found) / MANY < 0.6


def test_beyond_the_limit_are_divisions_and_numbers_above_999():
    found = turns(sums.limit_turn)
    assert {answer(turn) for turn in found} == {sums.LIMIT}
    for turn in found:
        question = turn["messages"][0]["content"].replace(",", "").lower()
        divides = r"[/%^]|divide|root|percent|half|square|power|third|prime"
        largest = max(map(int, re.findall(r"\d+", question)))
        assert re.search(divides, question) or largest > sums.LARGEST


@pytest.mark.parametrize("make", [sums.sum_turn, sums.truth_turn])
def test_no_numbers_of_a_test_are_in_training(make):
    def seen(split):
        numbers = (re.findall(r"\d+", calls(turn)[0][0]) for turn in turns(make, split))
        terms = (n if make is sums.sum_turn else n[:-1] for n in numbers)
        return {tuple(sorted(map(int, n))) for n in terms}

    train, test = seen("train"), seen("test")
    assert len(test) > 300
    assert not train & test
    assert {arithmetic.split_of(n) for n in test} == {"test"}
