import itertools
import random
import re
import tomllib
from pathlib import Path

import pytest

from tasks.base import check_conversation, is_held_out, text_of
from tasks.generated import conversation
from tasks.generated.spelling import words_of
from tasks.generated.writing import pick

TRAIN, TEST = 1500, 200


@pytest.fixture(scope="module")
def made():
    return {
        split: list(conversation.generate(split, count, grade=1, seed=0))
        for split, count in (("train", TRAIN), ("test", TEST))
    }


def turns_of(conversations):
    """Yield (question, answer, keys) of every turn."""
    for c in conversations:
        texts = [text_of(m["content"]) for m in c["messages"]]
        yield from zip(texts[::2], texts[1::2], c["turns"], strict=True)


def test_test_conversations_have_five_turns_of_five_kinds(made):
    for c in made["test"]:
        check_conversation(c)
        assert len({turn["kind"] for turn in c["turns"]}) == len(c["turns"]) == 5
    assert {len(c["turns"]) for c in made["train"]} == {1, 2, 3, 4, 5}


def test_a_grade_bounds_what_is_asked_in_tests_but_not_in_training(made):
    def largest(conversations):
        turns = list(turns_of(conversations))
        summed = [
            re.findall(r"\d+", answer.partition("=")[0])
            for _, answer, keys in turns
            if keys["kind"] == "sum"
        ]
        words = [len(keys["word"]) for _, _, keys in turns if "word" in keys]
        return max(words), max(map(len, summed)), max(int(n) for numbers in summed for n in numbers)

    hard = list(conversation.generate("test", TEST, grade=3, seed=0))
    longest, terms, number = largest(made["test"])
    assert (longest, terms) == (5, 2)
    assert 90 < number <= 99
    for longest, terms, number in (largest(hard), largest(made["train"])):
        assert longest == 10
        assert terms == 3
        assert number > 500


def test_no_word_is_in_both_splits_and_half_of_those_in_training_are_invented(made):
    words = {
        split: {keys["word"] for _, _, keys in turns_of(made[split]) if "word" in keys}
        for split in made
    }
    assert words["test"] <= set(words_of("test", longest=5))
    listed = words["train"] & set(words_of("train", longest=10))
    assert 0.2 < len(listed) / len(words["train"]) < 0.8
    assert not words["train"] & set(words_of("test", longest=30))


def test_the_expected_answers_are_right_and_those_of_another_kind_are_wrong(made):
    turns = list(turns_of(made["test"]))
    assert all(conversation.is_correct(keys, answer) for _, answer, keys in turns)
    for (_, _, keys), (_, other, other_keys) in itertools.pairwise(turns):
        if keys["kind"] != other_keys["kind"]:
            right = conversation.is_correct(keys, other)
            # Counts and sums may have the same number.
            assert not right or {keys["kind"], other_keys["kind"]} <= {"count", "length", "sum"}


def test_training_has_more_capitals_than_tests_and_no_writing_that_a_test_may_ask(made):
    shares = {
        split: [q == q.upper() for q, _, _ in turns_of(made[split]) if q != q.lower()]
        for split in made
    }
    capitals, in_tests = (sum(shares[split]) / len(shares[split]) for split in ("train", "test"))
    assert capitals > 1.5 * in_tests > 0
    talk = {
        split: {
            q for q, _, keys in turns_of(made[split]) if keys["kind"] in ("identity", "small talk")
        }
        for split in made
    }
    assert not talk["train"] & talk["test"]
    for split, writings in talk.items():
        held_out = {is_held_out(f"{conversation.NAME}/{q}", percent=10) for q in writings}
        assert held_out == {split == "test"}


def test_training_has_more_of_the_questions_that_are_rare_in_tests(made):
    found = {split: list(turns_of(made[split])) for split in made}

    def share(split, kinds, is_rare):
        asked = [question for question, _, keys in found[split] if keys["kind"] in kinds]
        return sum(map(is_rare, asked)) / len(asked)

    def has_u(question):
        return re.search(r"\bu\b", question.lower()) is not None

    def is_of_questions(split):
        words = [keys["word"] for _, _, keys in found[split] if "word" in keys]
        return sum(word in {"into", "write", "which", "often"} for word in words) / len(words)

    about = ("identity", "unknown")
    assert share("train", about, has_u) > 1.3 * share("test", about, has_u) > 0
    assert is_of_questions("train") > 0.003 > is_of_questions("test")


def test_training_draws_the_last_phrases_of_a_list_more_often_than_tests():
    phrases = range(30)
    last = {
        split: sum(pick(phrases, split, rng) >= 20 for _ in range(4000)) / 4000
        for split, rng in (("train", random.Random(0)), ("test", random.Random(0)))
    }
    # 1 - (20 / 30) ** (1 / power)
    assert last["test"] == pytest.approx(0.184, abs=0.03)
    assert last["train"] == pytest.approx(0.251, abs=0.03)


def test_every_table_of_the_talk_is_read():
    tree = tomllib.loads(Path(conversation.__file__).with_name("talk.toml").read_text())
    assert set(tree) == {"talk", "unknown", "fillers", "extra"}
    asked = {
        answer
        for _, answer, keys in turns_of(conversation.generate("train", 2000, grade=1, seed=1))
        if keys["kind"] in ("identity", "small talk")
    }
    assert asked == {talk["answer"] for talk in tree["talk"]}
