import functools
import random
import re

import pytest

from tasks.base import TaskError, is_final_number, prompt_key, text_of
from tasks.generated import arithmetic

GRADES = arithmetic.GRADES
MANY = 3000


def examples(split, num_examples, *, grade, seed=0):
    return list(arithmetic.generate(split, num_examples, grade=grade, seed=seed))


many = functools.cache(functools.partial(examples, num_examples=MANY))


def question(conversation):
    return conversation["messages"][0]["content"]


def answer(conversation):
    return text_of(conversation["messages"][-1]["content"])


def numbers(conversation):
    return [int(n) for n in re.findall(r"\d+", question(conversation))]


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_seed_decides_and_fewer_is_a_prefix(grade, split):
    once = examples(split, 200, grade=grade, seed=5)
    assert once == examples(split, 200, grade=grade, seed=5)
    assert examples(split, 50, grade=grade, seed=5) == once[:50]
    assert examples(split, 200, grade=grade, seed=6) != once


@pytest.mark.parametrize("grade", GRADES)
def test_no_question_comes_twice(grade):
    keys = [prompt_key(c) for c in many("train", grade=grade)]
    assert len(set(keys)) == MANY


def test_every_number_of_the_test_questions_is_in_training_too():
    train = {n for c in many("train", grade=1) for n in numbers(c)}
    assert train == set(range(2, 21))
    assert {n for c in many("test", grade=1) for n in numbers(c)} <= train


@pytest.mark.parametrize("grade", GRADES)
def test_an_example_is_right_by_its_own_answer_and_wrong_when_tampered_with(grade):
    for conversation in examples("test", 500, grade=grade):
        text = answer(conversation)
        number = int(conversation["answer"])
        assert is_final_number(conversation, text)
        assert is_final_number(conversation, f"#### {number:,}")
        for wrong in (number + 1, -number - 1, f"{number}1", f"{number}.5"):
            assert not is_final_number(conversation, f"{text}\n#### {wrong}")


@pytest.mark.parametrize("grade", GRADES)
def test_every_call_says_what_python_would(grade):
    for conversation in examples("train", 1000, grade=grade):
        content = conversation["messages"][-1]["content"]
        calls = [p["text"] for p in content if p["type"] == "python"]
        results = [p["text"] for p in content if p["type"] == "python_output"]
        assert [str(eval(call)) for call in calls] == results
        assert results[-1] == conversation["answer"]
        assert answer(conversation).splitlines()[-1].endswith(f"#### {conversation['answer']}")


def test_the_first_grade_is_one_small_step_with_a_short_answer():
    signs = set()
    for conversation in many("train", grade=1):
        a, b = numbers(conversation)
        sign = re.fullmatch(rf"<<{a}([+-]){b}=\d+>>#### \d+", answer(conversation))[1]
        signs.add(sign)
        assert len(question(conversation).split()) <= 22
        assert 2 <= min(a, b) <= max(a, b) <= 20
    assert signs == {"+", "-"}


def test_a_story_of_a_conversation_has_one_step_and_numbers_up_to_ninety_nine():
    rng = random.Random(0)
    found = [arithmetic.story("train", rng) for _ in range(500)]
    assert all(is_final_number(c, answer(c)) for c in found)
    assert {answer(c).count("<<") for c in found} == {1}
    assert max(n for c in found for n in numbers(c)) > 90


def test_grades_two_and_three_have_more_kinds_and_more_steps():
    steps = {
        grade: {answer(c).count("<<") for c in examples("train", 500, grade=grade)}
        for grade in GRADES
    }
    assert steps == {1: {1}, 2: {1}, 3: {2, 3}}
    texts = " ".join(answer(c) for c in examples("train", 500, grade=2))
    assert re.search(r"<<\d+\*\d+=", texts)


def test_no_amount_is_below_zero():
    for grade in GRADES:
        assert "=-" not in "".join(answer(c) for c in examples("train", 1000, grade=grade))


@pytest.mark.parametrize(("split", "grade"), [("train", 0), ("train", 4), ("valid", 1)])
def test_an_unknown_grade_or_split_is_refused(split, grade):
    with pytest.raises(TaskError):
        arithmetic.generate(split, 1, grade=grade, seed=0)
