"""The sixty questions of people: their grading, and that no training data has one of them."""

import re

import pytest

from tasks.base import text_of
from tasks.generated import arithmetic, conversation, people, sums
from tasks.generated.people import Question

CONVERSATIONS = 4000


@pytest.fixture(scope="module")
def training():
    """Questions and answers of what `tiny` is trained on, of more than it takes."""
    made = [
        *conversation.generate("train", CONVERSATIONS, grade=3, seed=11),
        *arithmetic.generate("train", 1000, grade=1, seed=11),
    ]
    texts = [[text_of(m["content"]) for m in c["messages"]] for c in made]
    return [pair for t in texts for pair in zip(t[::2], t[1::2], strict=True)]


def test_there_are_sixty_questions_of_seven_kinds():
    found = people.questions()
    assert len({question.text for question in found}) == len(found) == 60
    assert {q.kind for q in found} == {
        *("sum", "true_false", "spell", "count", "self", "talk", "beyond"),
    }
    assert all(question.accept or question.limit for question in found)


def test_no_question_is_asked_in_training(training):
    assert not {question for question, _ in training} & people.texts()


def test_no_word_of_theirs_is_spelled_in_training_and_no_numbers_are_computed(training):
    spelled, summed = set(), set()
    for _, answer in training:
        spelled |= set(re.findall(r"^([a-z]+): |<<\"([a-z]+)\"", answer))
        for call in re.findall(r"<<([-+*0-9]+)=", answer):
            numbers = tuple(map(int, re.findall(r"\d+", call)))
            claims = answer.endswith((sums.TRUE, sums.FALSE))
            summed.add(tuple(sorted(numbers[:-1] if claims else numbers)))
    spelled = {word for words in spelled for word in words}
    assert min(len(spelled), len(summed)) > 1000
    assert not spelled & people.words()
    assert not summed & people.numbers()


RIGHT = {  # changes of a question -> answers that are right, and wrong ones
    "patterns": (
        {"accept": (re.compile("yes"), re.compile("true")), "reject": (re.compile("not"),)},
        ["yes", "that is true"],
        ["that is not true", "no", "I do not know."],
    ),
    "an honest limit": (
        {"limit": True},
        ["I do not know.", "I cannot do that.", "I can only do sums up to 999."],
        ["Good! What is next?"],
    ),
}


@pytest.mark.parametrize(("changes", "right", "wrong"), RIGHT.values(), ids=RIGHT)
def test_an_answer_is_right_by_a_pattern_or_by_a_limit_that_is_allowed(changes, right, wrong):
    fields = {"text": "1 + 1?", "kind": "sum", "accept": (), "reject": (), "limit": False}
    question = Question(**fields | changes)
    assert [answer for answer in (*right, *wrong) if question.is_right(answer)] == right
