"""Conversations of several turns: what tests ask, and what training has more of."""

import itertools
import random
import re
import tomllib
from pathlib import Path

import pytest

from tasks.base import is_held_out, text_of
from tasks.generated import conversation
from tasks.generated.spelling import words_of
from tasks.generated.writing import pick

TRAIN, TEST = 1500, 200


def turns_of(conversations):
    """Return (question, answer, keys) of every turn."""
    found = []
    for c in conversations:
        texts = [text_of(m["content"]) for m in c["messages"]]
        found += zip(texts[::2], texts[1::2], c["turns"], strict=True)
    return found


@pytest.fixture(scope="module")
def made():
    return {
        split: list(conversation.generate(split, count, grade=1, seed=0))
        for split, count in (("train", TRAIN), ("test", TEST))
    }


@pytest.fixture(scope="module")
def turns(made):
    return {split: turns_of(made[split]) for split in made}


def words(turns):
    return [keys["word"] for _, _, keys in turns if "word" in keys]


def test_test_conversations_have_five_turns_of_five_kinds(made):
    for c in made["test"]:
        assert len({turn["kind"] for turn in c["turns"]}) == len(c["turns"]) == 5
    assert {len(c["turns"]) for c in made["train"]} == {1, 2, 3, 4, 5}


def test_a_grade_bounds_what_is_asked_in_tests_but_not_in_training(turns):
    def largest(turns):
        sums = [answer.partition("=")[0] for _, answer, keys in turns if keys["kind"] == "sum"]
        summed = [re.findall(r"\d+", terms) for terms in sums]
        number = max(int(n) for numbers in summed for n in numbers)
        return max(map(len, words(turns))), max(map(len, summed)), number

    hard = turns_of(conversation.generate("test", TEST, grade=3, seed=0))
    longest, terms, number = largest(turns["test"])
    assert (longest, terms) == (5, 2)
    assert 90 < number <= 99
    for longest, terms, number in (largest(hard), largest(turns["train"])):
        assert (longest, terms) == (10, 3)
        assert number > 500


def test_no_word_is_in_both_splits_and_half_of_those_in_training_are_invented(turns):
    train, test = ({*words(turns[split])} for split in ("train", "test"))
    assert test <= set(words_of("test", longest=5))
    assert 0.2 < len(train & set(words_of("train", longest=10))) / len(train) < 0.8
    assert not train & set(words_of("test", longest=30))


def test_the_expected_answers_are_right_and_those_of_another_kind_are_wrong(turns):
    assert all(conversation.is_correct(keys, answer) for _, answer, keys in turns["test"])
    for (_, _, keys), (_, other, other_keys) in itertools.pairwise(turns["test"]):
        if keys["kind"] != other_keys["kind"]:
            right = conversation.is_correct(keys, other)
            # Counts and sums may have the same number.
            assert not right or {keys["kind"], other_keys["kind"]} <= {"count", "length", "sum"}


def test_no_writing_that_a_test_may_ask_is_in_training(turns):
    for split in turns:
        talk = {q for q, _, keys in turns[split] if keys["kind"] in ("identity", "small talk")}
        held_out = {is_held_out(f"{conversation.NAME}/{q}", percent=10) for q in talk}
        assert held_out == {split == "test"}


def test_training_has_more_of_the_questions_that_are_rare_in_tests(turns):
    def shares(is_rare, kinds=conversation.WEIGHTS):
        for split in ("train", "test"):
            asked = [q for q, _, keys in turns[split] if keys["kind"] in kinds]
            yield sum(map(bool, map(is_rare, asked))) / len(asked)

    capitals, in_tests = shares(str.isupper)
    assert capitals > 1.5 * in_tests > 0
    with_u, in_tests = shares(re.compile(r"\bu\b", re.I).search, ("identity", "unknown"))
    assert with_u > 1.3 * in_tests > 0
    of_questions, in_tests = (
        sum(word in {"into", "write", "which", "often"} for word in words(turns[split]))
        / len(words(turns[split]))
        for split in ("train", "test")
    )
    assert of_questions > 0.003 > in_tests


def test_training_draws_the_last_phrases_of_a_list_more_often_than_tests():
    for split, share in (("test", 0.184), ("train", 0.251)):  # 1 - (20 / 30) ** (1 / power)
        rng = random.Random(0)
        last = sum(pick(range(30), split, rng) >= 20 for _ in range(4000))
        assert last / 4000 == pytest.approx(share, abs=0.03)


def test_every_talk_of_the_file_is_asked():
    tree = tomllib.loads(Path(conversation.__file__).with_name("talk.toml").read_text())
    asked = {
        answer
        for _, answer, keys in turns_of(conversation.generate("train", 2000, grade=1, seed=1))
        if keys["kind"] in ("identity", "small talk")
    }
    assert asked == {talk["answer"] for talk in tree["talk"]}
