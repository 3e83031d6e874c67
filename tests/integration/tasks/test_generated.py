"""No question of a generated task is in both splits: tens of thousands of them."""

import pytest

from tasks.base import prompt_key
from tests.unit.tasks import test_arithmetic as arithmetic
from tests.unit.tasks import test_spelling as spelling
from tests.unit.tasks import test_spelling_bee as spelling_bee


def test_no_set_of_numbers_is_in_both_splits_over_all_grades_and_seeds():
    seen = {
        split: {
            tuple(sorted(arithmetic.numbers(c)))
            for grade in arithmetic.GRADES
            for seed in (0, 1)
            for c in arithmetic.many(split, grade=grade, seed=seed)
        }
        for split in ("train", "test")
    }
    assert len(seen["test"]) > 300
    assert not seen["train"] & seen["test"]


@pytest.mark.parametrize("kind", ["spell", "count", "length"])
def test_no_word_is_in_both_splits_over_all_grades_and_seeds(kind):
    words = {
        split: {
            c["word"]
            for grade in spelling.GRADES
            for seed in (0, 1)
            for c in spelling.of_kind(kind, spelling.many(split, grade=grade, seed=seed))
        }
        for split in ("train", "test")
    }
    assert len(words["test"]) > 100
    assert not words["train"] & words["test"]


@pytest.mark.parametrize("name", spelling_bee.NAMES)
def test_no_test_question_is_asked_in_training(name):
    many = spelling_bee.examples(name, "train", 20_000)
    assert len(many) == 20_000  # more than there are words
    train = {prompt_key(c) for c in many}
    test = {prompt_key(c) for c in spelling_bee.examples(name, "test", 2000, seed=1)}
    assert len(test) > 100
    assert not train & test
