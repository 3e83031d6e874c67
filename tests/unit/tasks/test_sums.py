import itertools
import random
import re

import pytest

from tasks.base import is_final_number, text_of
from tasks.generated import arithmetic, sums

MANY = 2000


def turns(make, split="train", seed=0):
    rng = random.Random(seed)
    return [make(split, rng) for _ in range(MANY)]


def question(turn):
    return turn["messages"][0]["content"]


def calls(turn):
    content = turn["messages"][1]["content"]
    return [(a["text"], b["text"]) for a, b in itertools.pairwise(content) if a["type"] == "python"]


def test_sums_have_two_or_three_numbers_up_to_999_and_all_three_signs():
    found = turns(sums.sum_turn)
    assert all(is_final_number(turn, text_of(turn["messages"][1]["content"])) for turn in found)
    terms = [re.findall(r"\d+", calls(turn)[0][0]) for turn in found]
    assert {len(numbers) for numbers in terms} == {2, 3}
    assert sum(len(numbers) == 3 for numbers in terms) > MANY / 10
    assert max(int(n) for numbers in terms for n in numbers) > 900
    assert all(0 <= int(turn["answer"]) <= sums.LARGEST * 10 for turn in found)
    assert {sign for turn in found for sign in re.findall(r"[-+*]", calls(turn)[0][0])} == set(
        "+-*"
    )


def test_products_come_before_sums():
    assert sums.expression("+*", (10, 4, 5)) == ("10+4*5", 30)
    assert sums.expression("*-", (10, 4, 5)) == ("10*4-5", 35)
    assert sums.expression("-", (9, 4)) == ("9-4", 5)


def test_half_of_the_claims_are_true_and_the_answer_says_which():
    found = turns(sums.truth_turn)
    for turn in found:
        [(_, difference)] = calls(turn)
        answer = text_of(turn["messages"][1]["content"])
        assert answer.endswith(sums.TRUE if difference == "0" else sums.FALSE)
        assert sums.is_true(turn, answer)
        other = sums.FALSE if difference == "0" else sums.TRUE
        assert not sums.is_true(turn, answer.replace(answer.rpartition(">>")[2], other))
    assert 0.4 < sum(turn["answer"] == "True" for turn in found) / MANY < 0.6


def test_beyond_the_limit_are_divisions_and_numbers_above_999():
    found = turns(sums.limit_turn)
    assert {turn["messages"][1]["content"] for turn in found} == {sums.LIMIT}
    for turn in found:
        numbers = [int(n) for n in re.findall(r"\d+", question(turn).replace(",", ""))]
        divides = re.search(
            r"[/%^]|divide|root|percent|half|square|power|third|prime", question(turn).lower()
        )
        assert divides or max(numbers) > sums.LARGEST


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
