"""What every generated task promises, one column for each; then what is special in one."""

import functools
import re
from pathlib import Path

import pytest

from nanochat_core.engine.tools.calculator import calculate
from tasks import registry
from tasks.base import TaskError, check_conversation, prompt_key, text_of
from tasks.generated import spelling

GRADES = {"arithmetic": (1, 2, 3), "spelling": (1, 2, 3), "conversation": (1, 3)}
GRADES |= dict.fromkeys(("identity", "simple_spelling", "spelling_bee"), (1,))
REPEATS = ("simple_spelling", "spelling_bee")  # there are more questions than words
GRADED = [name for name in GRADES if name != "identity"]
SPLITS = ("train", "test")

every_task = pytest.mark.parametrize("name", GRADES)
every_grade = pytest.mark.parametrize(
    ("name", "grade"), [(n, g) for n in GRADES for g in GRADES[n]]
)
every_graded = pytest.mark.parametrize(
    ("name", "grade"), [(n, g) for n in GRADED for g in GRADES[n]]
)


@functools.cache
def made(name, split="train", count=2000, *, grade=1, seed=0):
    return list(registry.generate(name, split, count, grade=grade, seed=seed))


def question(c):
    return c["messages"][0]["content"]


def answer(c):
    return text_of(c["messages"][-1]["content"])


def parts(c, kind):
    contents = [m["content"] for m in c["messages"] if isinstance(m["content"], list)]
    return [part["text"] for content in contents for part in content if part["type"] == kind]


def numbers(text):
    return tuple(sorted(map(int, re.findall(r"\d+", text))))


def secrets(name, c):
    """What may be in one split only: a set of numbers, a word, or each question."""
    if name == "arithmetic":
        return {numbers(question(c))}
    if name == "spelling":
        return {(c["kind"], c["word"])}
    if name == "conversation":
        return {m["content"] for m in c["messages"] if m["role"] == "user"}
    return {prompt_key(c)}


@every_grade
def test_the_seed_decides_and_fewer_is_a_prefix(name, grade):
    for split in SPLITS:
        once = made(name, split, 200, grade=grade, seed=5)
        assert list(registry.generate(name, split, 200, grade=grade, seed=5)) == once
        assert made(name, split, 50, grade=grade, seed=5) == once[:50]
        assert made(name, split, 200, grade=grade, seed=6) != once
    keys = [prompt_key(c) for c in made(name, grade=grade)]
    assert len(set(keys)) == len(keys) or name in REPEATS


@every_grade
def test_a_call_has_the_result_of_python_and_of_the_calculator(name, grade):
    for c in made(name, grade=grade):
        check_conversation(c)
        assert "{" not in question(c)
        calls, results = parts(c, "python"), parts(c, "python_output")
        assert [str(eval(call)) for call in calls] == list(map(calculate, calls)) == results
        if "answer" in c:
            assert results[-1] == c["answer"]
            assert answer(c).endswith(f"#### {c['answer']}")


@every_graded
def test_an_answer_is_right_as_it_is_and_wrong_when_it_is_changed(name, grade):
    for c in made(name, "test", 300, grade=grade):
        is_correct = functools.partial(registry.grader_of(name).is_correct, c)
        assert is_correct(answer(c))
        for wrong in (answer(c)[:-1], answer(c) + "1", answer(c)[:-1] + "#", "", "?"):
            is_open = name == "conversation" and c["turns"][-1]["kind"] == "unknown"
            assert not is_correct(wrong) or (is_open and wrong.startswith("I ")), wrong


@every_task
def test_nothing_that_is_tested_is_trained_on(name):
    train, test = (
        {
            secret
            for grade in GRADES[name]
            for seed in (0, 1)
            for c in made(name, split, count, grade=grade, seed=seed)
            for secret in secrets(name, c)
        }
        for split, count in (("train", 10_000 if name in REPEATS else 2000), ("test", 1000))
    )
    assert len(test) > (10 if name == "identity" else 100)
    assert not train & test


@every_task
def test_an_unknown_split_or_grade_is_refused(name):
    with pytest.raises(TaskError, match="no split 'dev'"):
        list(registry.generate(name, "dev", 1, grade=1, seed=0))
    for grade in (0, 4) if name in ("arithmetic", "spelling") else ():
        with pytest.raises(TaskError, match="grade"):
            list(registry.generate(name, "train", 1, grade=grade, seed=0))


def test_grades_are_steps():
    sums = {grade: made("arithmetic", grade=grade) for grade in (1, 2, 3)}
    steps = {grade: {len(parts(c, "python")) for c in sums[grade]} for grade in sums}
    assert steps == {1: {1}, 2: {1}, 3: {2, 3}}
    signs = {
        g: set("".join(parts(c, "python")[0] for c in sums[g])) - {*"0123456789"} for g in sums
    }
    assert (signs[1], signs[2]) == ({"+", "-"}, {"+", "-", "*"})
    for split in SPLITS:
        asked = made("arithmetic", split)
        assert {n for c in asked for n in numbers(question(c))} == set(range(2, 21))
    assert max(len(question(c).split()) for c in sums[1]) <= 22
    assert "=-" not in "".join(answer(c) for grade in sums for c in sums[grade])
    for grade, longest in ((1, 5), (2, 7), (3, 10)):
        spelled = made("spelling", grade=grade)
        assert {len(c["word"]) for c in spelled} == set(range(3, longest + 1))
        assert {c["kind"] for c in spelled} == {"spell", "count", "length"}


SPELL = {"kind": "spell", "word": "apple"}
COUNT = {"kind": "count", "word": "apple", "letter": "p", "answer": "2"}
BEE = {"messages": [{"role": "assistant", "content": "#### 2"}]}


@pytest.mark.parametrize(
    ("name", "key", "right", "wrong"),
    [
        (
            *("spelling", SPELL),
            ["apple: a,p,p,l,e", "a,p,p,l,e", "A - P - P - L - E", "The letters: a, p, p, l, e.\n"],
            [
                *("apple", "app,le", "a,p,l,e", "p,p,l,e,a", ":", ",,,", "apple: apple"),
                *("apple: a,p,p,l,e: apple", "apple: a,p,p,l,e\n#### 2"),
            ],
        ),
        ("spelling", COUNT, ["#### 2"], ["2", "#### 3", "#### 22"]),
        (
            *("arithmetic", {"answer": "1234"}, ["#### 1,234", "#### 1234"]),
            [f"#### 1234\n#### {wrong}" for wrong in ("1235", "-1234", "12341", "1234.5")],
        ),
        # nanochat's rule: the first number after the first marker.
        (
            *("spelling_bee", BEE, ["#### 2", "#### 2 letters", "#### 2x", "#### 2, no: #### 99"]),
            ["#### 99, no: #### 2", "#### 2.", "#### 2.0", "####2", "2"],
        ),
    ],
)
def test_an_answer_counts_by_its_letters_or_by_its_number(name, key, right, wrong):
    is_correct = functools.partial(registry.grader_of(name).is_correct, key)
    assert [text for text in right if not is_correct(text)] == []
    assert [text for text in wrong if is_correct(text)] == []


def test_words_are_plain_and_each_is_in_one_split():
    lines = Path(spelling.__file__).with_name("words.txt").read_text("ascii").splitlines()
    assert lines == sorted(set(lines))
    assert all(re.fullmatch("[a-z]{3,10}", word) for word in lines)
    train, test = (spelling.words_of(split, longest=10) for split in SPLITS)
    assert sorted([*train, *test]) == lines
    assert len(lines) >= 1500
    assert 0.05 < len(test) / len(lines) < 0.15
    assert spelling.words_of("test", longest=5) == tuple(w for w in test if len(w) <= 5)


def test_a_question_of_spelling_names_the_word_and_the_letter_as_people_write():
    for c in (*made("spelling"), *made("spelling", grade=3)):
        words = re.findall("[a-z]+", question(c).lower())
        assert c["word"] in words
        assert "letter" not in c or {c["letter"], f"{c['letter']}s"} & set(words)
    texts = [question(c) for c in made("spelling")]
    assert sum(q.isupper() for q in texts) > len(texts) // 100
    assert sum(q.islower() for q in texts) > len(texts) // 10
    assert sum(q[0].isupper() and not q.isupper() for q in texts) > len(texts) // 4
    assert sum("please" in q.lower() for q in texts) > len(texts) // 100


def test_letters_are_counted_by_the_calculator():
    for c in made("spelling", grade=3):
        calls = {"spell": [], "count": [f'"{c["word"]}".count("{c.get("letter")}")']}
        calls["length"] = [f'"{c["word"]}".count("")-1']
        assert parts(c, "python") == calls[c["kind"]]
    counts = [c["answer"] for c in made("spelling") if c["kind"] == "count"]
    assert 0.05 < counts.count("0") / len(counts) < 0.3


def test_a_letter_is_counted_in_words_and_by_the_calculator():
    for c in made("spelling_bee"):
        word, letter = parts(c, "python")[0].split("'")[1::2]
        assert parts(c, "python") == [f"'{word}'.count('{letter}')"]
        hits = iter(range(1, 99))
        walk = [
            f"{place}:{found}" + (f" that is {next(hits)}" if found == letter else "")
            for place, found in enumerate(word, 1)
        ]
        lines = answer(c).split("\n")
        assert lines[0] == f"{word}:{','.join(word)}"
        assert lines[lines.index(f"Counting {letter}:") + 1 :][: len(word)] == walk
        assert {word, letter} <= {w.strip("'\"?.,`") for w in question(c).split()}
    assert any(c["answer"] == "0" for c in made("spelling_bee"))
    assert all(question(c) == f"Spell the word: {c['word']}" for c in made("simple_spelling"))
    assert all(answer(c) == f"{c['word']}:{','.join(c['word'])}" for c in made("simple_spelling"))


def test_the_identity_is_short_and_plain_and_its_test_asks_the_same_in_other_words():
    train, test = (made("identity", split) for split in SPLITS)
    assert (len(train) >= 60, len(test) >= 10) == (True, True)
    assert {len(c["messages"]) for c in train} == {2, 4}
    texts = [m["content"] for c in train + test for m in c["messages"]]
    assert all(text.isascii() and 0 < len(text) <= 120 for text in texts)
    assert {answer(c) for c in test} <= {answer(c) for c in train}
