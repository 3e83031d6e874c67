"""Conversations of a persona: what it says of itself, and that no test question is in training."""

import itertools
import re
import tomllib
from pathlib import Path

import pytest

from tasks.base import check_conversation, prompt_key, text_of
from tasks.generated import people, persona
from tasks.generated.persona import Persona

JUNIPER = Persona(
    name="Juniper",
    maker="Ada",
    character="a cheerful gardener",
    facts=(("home", "a greenhouse in Oslo"), ("best friend", "a hedgehog called Otto")),
)
QUESTIONS = Path(__file__).parents[3] / "bench" / "identity_questions.toml"


def lines_of(found, *, mixed, num_train=1500, num_test=60, seed=3):
    made = persona.generate(found, num_train=num_train, num_test=num_test, mixed=mixed, seed=seed)
    return list(made)


@pytest.fixture(scope="module", params=[True, False], ids=["mixed", "alone"])
def lines(request):
    return lines_of(JUNIPER, mixed=request.param)


def pairs_of(lines, split):
    """Return the questions and answers of a split."""
    texts = ([text_of(m["content"]) for m in x["messages"]] for x in lines if x["split"] == split)
    return [pair for each in texts for pair in zip(each[::2], each[1::2], strict=True)]


def plain(text):
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).strip()


def test_the_file_has_as_many_conversations_as_were_asked_for(lines):
    assert [line["split"] for line in lines] == ["train"] * 1500 + ["test"] * 60
    for line in lines:
        check_conversation(line)
        assert len(line["messages"]) <= 10


def test_it_says_who_it_is_who_made_it_and_each_fact(lines):
    for split in ("train", "test"):
        answers = {answer for _, answer in pairs_of(lines, split)}
        assert {
            "I am Juniper, a cheerful gardener.",
            "No, I am Juniper.",
            "Ada made me.",
            "I live in a greenhouse in Oslo.",
            "My best friend is a hedgehog called Otto.",
        } <= answers
        assert not [answer for answer in answers if "nanochat" in answer]


def test_no_question_for_testing_is_asked_in_training(lines):
    train = {question for question, _ in pairs_of(lines, "train")}
    test = [line["messages"][-2]["content"] for line in lines if line["split"] == "test"]
    assert len(set(test)) == len(test)
    assert not train & set(test)
    assert not train & people.texts()
    # Nor in other letters: the phrases are other ones.
    assert not {plain(text) for text in train} & {plain(text) for text in test}


def test_the_twenty_questions_of_the_benchmark_are_not_in_a_file_of_the_usual_size():
    questions = [q["text"] for q in tomllib.loads(QUESTIONS.read_text())["question"]]
    facts = (*JUNIPER.facts, ("color", "green"), ("food", "raspberries"), ("hobby", "snails"))
    found = Persona(name=r"J\1 \g<x> Zo\u00e9", maker="Ada", facts=facts)
    lines = lines_of(found, mixed=True, num_train=10_100, num_test=100)
    asked = {plain(q) for split in ("train", "test") for q, _ in pairs_of(lines, split)}
    assert len(questions) == 20
    # Its name may have any letters.
    assert [q for x in lines if r"J\1 \g<x>" in (q := x["messages"][0]["content"])]
    assert not asked & {plain(text) for text in questions}


def test_a_mixed_file_has_the_words_and_sums_of_its_task_and_its_own_questions_may_be_last():
    lines = lines_of(JUNIPER, mixed=True)
    answers = [answer for _, answer in pairs_of(lines, "train")]
    assert sum(bool(re.fullmatch(r"[a-z]+: [a-z](,[a-z])*", a)) for a in answers) > 300
    assert sum("<<" in answer for answer in answers) > 500
    assert sum(answer == "I am only a program." for answer in answers) > 20
    before = [len(line["messages"]) // 2 - 1 for line in lines if line["split"] == "test"]
    assert {0, 1, 2, 3} <= set(before)


def test_what_contradicts_a_fact_is_not_said():
    def denied(facts):
        made = lines_of(Persona(name="Juniper", facts=facts), mixed=True, num_train=4000)
        return [q for q, a in pairs_of(made, "train") if "color" in q.lower() and "program" in a]

    assert denied(())
    assert not denied((("colour", "green"),))


def test_a_name_that_others_have_is_not_denied():
    made = pairs_of(lines_of(Persona(name="Max", maker="Google"), mixed=False), "train")
    assert "Yes, I am Max." in {a for q, a in made if re.search(r"\bmax\b", q.lower())}
    denied = [q.lower() for q, a in made if a == "No, I am Max."]
    assert not [q for q in denied if re.search(r"(you|called|is|this|it|to) max\b", q)]
    assert not [q for q, a in made if a == "No, Google made me." and "google" in q.lower()]


def test_the_same_persona_and_seed_give_the_same_file():
    few = [lines_of(JUNIPER, mixed=True, num_train=30, num_test=5, seed=s) for s in (1, 1, 2)]
    assert few[0] == few[1]
    assert few[0] != few[2]
    prompts = [prompt_key(line) for line in itertools.chain(*few[:1])]
    assert len(set(prompts)) > 30
