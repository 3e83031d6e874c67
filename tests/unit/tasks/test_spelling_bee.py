import pytest

from tasks import registry
from tasks.base import text_of

NAMES = ("simple_spelling", "spelling_bee")


def examples(name, split, num_examples, *, seed=0):
    return list(registry.generate(name, split, num_examples, grade=1, seed=seed))


def answer(conversation):
    return text_of(conversation["messages"][-1]["content"])


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_and_fewer_is_a_prefix(name):
    once = examples(name, "train", 300, seed=5)
    assert examples(name, "train", 40, seed=5) == once[:40]
    assert examples(name, "train", 300, seed=6) != once


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_right_by_its_own_answer_and_wrong_when_tampered_with(name):
    for conversation in examples(name, "test", 300):
        text = answer(conversation)
        assert registry.grader_of(name).is_correct(conversation, text)
        assert not registry.grader_of(name).is_correct(conversation, text[:-1])
        assert not registry.grader_of(name).is_correct(conversation, text + "1")
        assert not registry.grader_of(name).is_correct(conversation, "")


def test_a_word_is_spelled_in_one_wording():
    conversation = examples("simple_spelling", "train", 1)[0]
    word = conversation["word"]
    assert conversation["messages"][0]["content"] == f"Spell the word: {word}"
    assert answer(conversation) == f"{word}:{','.join(word)}"


def test_letters_are_counted_in_words_and_by_the_calculator():
    seen_absent = False
    for conversation in examples("spelling_bee", "train", 500):
        text, call, result, last = conversation["messages"][1]["content"]
        word, letter = call["text"].split("'")[1::2]
        count = str(word.count(letter))
        assert (call["text"], result["text"]) == (f"'{word}'.count('{letter}')", count)
        lines = text["text"].split("\n")
        walked = lines[lines.index(f"Counting {letter}:") + 1 : -2]
        assert [line.split(" that is ")[0] for line in walked] == [
            f"{place}:{found}" for place, found in enumerate(word, start=1)
        ]
        assert [line.split(" that is ")[1] for line in walked if " that is " in line] == [
            str(i + 1) for i in range(int(count))
        ]
        assert lines[0] == f"{word}:{','.join(word)}"
        assert last["text"] == f"\n\n#### {count}"
        assert conversation["answer"] == count
        question = conversation["messages"][0]["content"]
        assert word in question
        assert letter in question
        seen_absent |= count == "0"
    assert seen_absent


@pytest.mark.parametrize(
    ("answer", "is_correct"),
    [
        ("#### {n}", True),
        ("#### {n} letters", True),
        ("#### {n}x", True),
        ("#### {n}, no: #### 99", True),
        ("#### 99, no: #### {n}", False),
        ("#### {n}.", False),
        ("#### {n}.0", False),
        ("####{n}", False),
        ("{n}", False),
    ],
)
def test_a_count_is_read_by_nanochats_rule(answer: str, is_correct: bool):
    conversation = examples("spelling_bee", "test", 1)[0]
    text = answer.format(n=conversation["answer"])
    assert registry.grader_of("spelling_bee").is_correct(conversation, text) == is_correct
