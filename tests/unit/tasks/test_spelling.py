import functools
from pathlib import Path

import pytest

from nanochat_core.engine.tools.calculator import calculate
from tasks.base import TaskError, prompt_key, text_of
from tasks.generated import spelling

GRADES = tuple(spelling.GRADES)
MANY = 3000


def examples(split, num_examples, *, grade, seed=0):
    return list(spelling.generate(split, num_examples, grade=grade, seed=seed))


many = functools.cache(functools.partial(examples, num_examples=MANY))


def answer(conversation):
    return text_of(conversation["messages"][-1]["content"])


def of_kind(kind, conversations):
    return [c for c in conversations if c["kind"] == kind]


def test_the_word_list_is_sorted_plain_and_without_repeats():
    lines = Path(spelling.__file__).with_name("words.txt").read_text(encoding="ascii").split("\n")
    assert lines.pop() == ""
    assert lines == sorted(set(lines))
    assert len(lines) >= 1500
    assert all(w.isascii() and w.isalpha() and w.islower() and 3 <= len(w) <= 10 for w in lines)


def test_every_word_is_in_one_split():
    train, test = (spelling.words_of(split, longest=10) for split in ("train", "test"))
    assert not set(train) & set(test)
    assert 0.05 < len(test) / len(train + test) < 0.15
    assert spelling.words_of("test", longest=5) == tuple(w for w in test if len(w) <= 5)


@pytest.mark.parametrize("grade", GRADES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_seed_decides_and_fewer_is_a_prefix(grade, split):
    once = examples(split, 200, grade=grade, seed=5)
    assert once == examples(split, 200, grade=grade, seed=5)
    assert examples(split, 50, grade=grade, seed=5) == once[:50]
    assert examples(split, 200, grade=grade, seed=6) != once
    assert len({prompt_key(c) for c in once}) == 200


@pytest.mark.parametrize(("grade", "longest"), [(1, 5), (2, 7), (3, 10)])
def test_a_grade_bounds_the_length_of_words_and_asks_all_kinds(grade, longest):
    found = many("train", grade=grade)
    assert {len(c["word"]) for c in found} == set(range(3, longest + 1))
    assert {c["kind"] for c in found} == {"spell", "count", "length"}


@pytest.mark.parametrize("grade", GRADES)
def test_the_question_names_the_word_and_the_letter(grade):
    for c in examples("train", 500, grade=grade):
        question = c["messages"][0]["content"]
        assert c["word"] in question.lower()
        assert c.get("letter", "") in question.lower()
        assert "{" not in question


def test_people_write_in_small_letters_in_capitals_and_with_a_word_of_thanks():
    asked = [c["messages"][0]["content"] for c in many("train", grade=1)]
    assert sum(q.isupper() for q in asked) > MANY // 100
    assert sum(q.islower() for q in asked) > MANY // 10
    assert sum(q[0].isupper() and not q.isupper() for q in asked) > MANY // 4
    assert sum("please" in q.lower() for q in asked) > MANY // 100


@pytest.mark.parametrize("grade", GRADES)
def test_a_spelling_that_was_tampered_with_is_wrong(grade):
    for conversation in of_kind("spell", examples("test", 300, grade=grade)):
        text, word = answer(conversation), conversation["word"]
        swapped = ",".join([*word[1:], word[0]])
        wrong = [text[:-2], text + ",e", text[:-1] + "#", word, f"{word}: {word}"]
        if len(set(word)) > 1:
            wrong.append(f"{word}: {swapped}")
        for tampered in wrong:
            assert not spelling.is_correct(conversation, tampered), tampered


@pytest.mark.parametrize("grade", GRADES)
def test_a_count_that_was_tampered_with_is_wrong(grade):
    for conversation in of_kind("count", examples("test", 300, grade=grade)):
        text, number = answer(conversation), conversation["answer"]
        for tampered in (text + "1", text[:-1], text[:-1] + str(int(number) + 1), number):
            assert not spelling.is_correct(conversation, tampered), tampered


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("apple: a,p,p,l,e", True),
        ("a,p,p,l,e", True),
        ("A - P - P - L - E", True),
        ("The letters are: a, p, p, l, e.\n", True),
        ("apple", False),
        ("app,le", False),
        ("a,p,l,e", False),
        ("apple: a,p,p,l,e: apple", False),
        ("apple: a,p,p,l,e\n#### 2", False),
        ("", False),
        (":", False),
        (",,,", False),
    ],
)
def test_letters_count_when_each_stands_alone(text, right):
    assert spelling.is_correct({"kind": "spell", "word": "apple"}, text) == right


def test_a_count_is_worked_out_by_the_calculator():
    for conversation in of_kind("count", examples("train", 500, grade=3)):
        content = conversation["messages"][-1]["content"]
        assert [p["type"] for p in content] == ["python", "python_output", "text"]
        word, letter = conversation["word"], conversation["letter"]
        assert content[0]["text"] == f'"{word}".count("{letter}")'
        assert content[1]["text"] == conversation["answer"] == str(word.count(letter))
        assert content[2]["text"] == f"#### {word.count(letter)}"


def test_all_letters_are_counted_by_the_calculator():
    found = of_kind("length", examples("train", 500, grade=3))
    assert len(found) > 20
    for conversation in found:
        call, result, text = conversation["messages"][-1]["content"]
        assert calculate(call["text"]) == result["text"] == str(len(conversation["word"]))
        assert text["text"] == f"#### {len(conversation['word'])}"


@pytest.mark.parametrize(("split", "grade"), [("train", 0), ("train", 4), ("valid", 1)])
def test_an_unknown_grade_or_split_is_refused(split, grade):
    with pytest.raises(TaskError):
        spelling.generate(split, 1, grade=grade, seed=0)
