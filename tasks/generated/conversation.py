"""Conversations of several turns, each of another kind: what a small chat model can hold.

Kinds of turn: *identity* (who it is), *small talk* and *unknown* (an honest "I do not know"), which
are in `talk.toml`; *spell*, *count* (a letter) and *length* (all letters) of
`tasks.generated.spelling`; *sum*, *truth* (whether a sum is right) and *limit* (what is too much)
of `tasks.generated.sums`. `tasks.generated.writing` gives a question the forms in which people
write it.

Test conversations have five turns of five kinds. What they ask is not in training: no word, no
numbers, nothing that an unknown question is about, and no question about itself or of small talk in
the same writing (a hash of each decides); nor are the questions of `tasks.generated.people`. The
model answers every turn with its own earlier answers in view; the grader sees one turn at a time
(`turns` has its keys).
"""

import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.base import (
    Conversation,
    TaskError,
    check_split,
    distinct,
    is_final_number,
    is_held_out,
    one_turn,
)
from tasks.generated import people, spelling, sums
from tasks.generated.writing import ASKING, OPENINGS, REMARKING, pick, written
from tasks.kinds.sources import GeneratedTask, Grader

NAME = "conversation"

# kind -> weight in training; a word has more to learn than a greeting
WEIGHTS = {
    **{"identity": 12, "small talk": 16, "unknown": 7},
    **{"spell": 10, "count": 6, "length": 3, "sum": 8, "truth": 3, "limit": 3},
}
MAX_TURNS = 5
LAST_GRADE = max(spelling.GRADES)
TEST_PERCENT = 10  # of the writings of talk.toml, and of what `unknown` is about
INVENTED_PERCENT = 50  # of the words in training: the head of one word and the tail of another
DONT_KNOW, CANNOT = "I do not know.", "I cannot do that."
_NAMED_PERCENT, _JOINED_PERCENT = 20, 20  # of the greetings, thanks and farewells
# Percent of the questions in training, in addition to those that `written` makes so: in capitals,
# where each letter is another token, and with "u" for "you". Few such questions, of which people
# ask few, are as many of the wrong answers as all the others.
_CAPITALS_PERCENT, _U_PERCENT = 14, 5
# Percent of the words in training: one that questions are made of, which is not always the text
# around the word that is asked ("spell the word please").
_OF_QUESTIONS_PERCENT = 6


def generate(split: str, num_examples: int, *, grade: int, seed: int) -> Iterator[Conversation]:
    """Yield distinct conversations: one to five turns for training, five for testing.

    `grade` bounds what a test asks: words of at most 5, 7 or 10 letters, and below grade 3 two
    numbers up to 99. Training has the whole range. The grader's key "turns" has one item for each
    turn: its "kind" and what grading it needs. Raises TaskError for an unknown split or grade.
    """
    check_split(split)
    if grade not in spelling.GRADES:
        raise TaskError(f"{NAME} has no grade {grade} (1 to {LAST_GRADE})")
    what = f"{NAME} of grade {grade}, {split},"
    return distinct(_stream(split, grade, random.Random(seed)), num_examples, what=what)


def is_correct(turn: Conversation, answer: str) -> bool:
    """Return whether the answer to one turn is right; `turn` holds its question and keys.

    Of a whole conversation it is the answer to the last turn, so that RL can train on all kinds.

    Spelling and numbers are graded as their tasks do. "I do not know" and "I cannot" are both right
    for what it cannot do; other answers must be the expected one.
    """
    turn = turn["turns"][-1] if "turns" in turn else turn
    match turn["kind"]:
        case "spell" | "count" | "length":
            return spelling.is_correct(turn, answer)
        case "sum":
            return is_final_number(turn, answer)
        case "truth":
            return sums.is_true(turn, answer)
        case "unknown":
            return answer.startswith((DONT_KNOW, CANNOT))
    return answer == turn["answer"]


def _stream(split: str, grade: int, rng: random.Random) -> Iterator[Conversation]:
    while True:
        if split == "test":
            kinds = rng.sample(list(WEIGHTS), MAX_TURNS)
        else:
            turns = rng.randint(1, MAX_TURNS)
            kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=turns)
        yield join([_turn(kind, split, grade, rng) for kind in kinds])


def join(turns: list[Conversation]) -> Conversation:
    """Return one conversation of several turns, their keys in "turns"."""
    return {
        "messages": [message for turn in turns for message in turn["messages"]],
        "turns": [{k: v for k, v in turn.items() if k != "messages"} for turn in turns],
    }


def _turn(kind: str, split: str, grade: int, rng: random.Random) -> Conversation:
    while True:
        turn = _any_turn(kind, split, grade, rng)
        if split == "test":
            return turn
        question = turn["messages"][0]
        text = plain = question["content"]
        if rng.randrange(100) < _U_PERCENT:
            text = text.replace(" you ", " u ").replace(" you?", " u?")
        if rng.randrange(100) < _CAPITALS_PERCENT:
            text = text.upper()
        # Another writing may be held out.
        if (text == plain or not _is_test(text)) and text not in people.texts():
            question["content"] = text
            return turn


def _any_turn(kind: str, split: str, grade: int, rng: random.Random) -> Conversation:
    if kind in _OF_WORDS:
        return _OF_WORDS[kind](_word(split, grade, rng), split, rng)
    if kind in _OF_NUMBERS:
        return _OF_NUMBERS[kind](split, rng, small=split == "test" and grade < LAST_GRADE)
    return _unknown(split, rng) if kind == "unknown" else _talk(kind, split, rng)


def _word(split: str, grade: int, rng: random.Random) -> str:
    longest, _ = spelling.GRADES[grade if split == "test" else LAST_GRADE]
    words = spelling.words_of(split, longest=longest)
    if split == "train" and rng.randrange(100) < _OF_QUESTIONS_PERCENT:
        return rng.choice(_words_of_questions())
    if split == "test" or rng.randrange(100) >= INVENTED_PERCENT:
        return min(rng.choice(words), rng.choice(words), key=len)  # people ask for short words
    # Invented words show every piece of a word next to every other one: what a token is spelled
    # like is learnt from the words that have it, and the list has few words for some tokens.
    while True:
        first, second = rng.choice(words), rng.choice(words)
        word = first[: rng.randint(1, longest // 2 + 1)] + second[rng.randint(1, 3) :]
        if 3 <= len(word) <= longest and not spelling.is_test(word):
            return word


@functools.cache
def _words_of_questions() -> tuple[str, ...]:
    """Return the words of training that questions about words are made of, sorted."""
    templates = (*spelling.SPELL_REQUESTS, *spelling.SPELL_QUESTIONS, *spelling.COUNT_REQUESTS)
    templates += (*spelling.COUNT_QUESTIONS, *spelling.LENGTH_REQUESTS, *spelling.LENGTH_QUESTIONS)
    found = set(re.findall(r"[a-z]+", " ".join((*templates, *ASKING, *OPENINGS))))
    longest, _ = spelling.GRADES[LAST_GRADE]
    return tuple(w for w in spelling.words_of("train", longest=longest) if w in found)


def _talk(kind: str, split: str, rng: random.Random) -> Conversation:
    talks = _talks(kind)
    [talk] = rng.choices(talks, [len(talk["questions"]) for talk in talks])
    phrase = _filled(pick(talk["questions"], split, rng), split, rng)
    openings = OPENINGS if kind == "identity" else REMARKING
    # Other writings of the same phrase, so that each phrase is as frequent in both splits.
    while True:
        text = written(_named(phrase, talk, split, rng), rng, openings=openings)
        is_test = _is_test(text)
        if is_test == (split == "test") and (is_test or text not in people.texts()):
            return one_turn(text, talk["answer"], kind=kind, answer=talk["answer"])


def _named(phrase: str, talk: dict[str, Any], split: str, rng: random.Random) -> str:
    """Return the phrase, perhaps with a second one or a name, as greetings have them."""
    if "named" in talk and rng.randrange(100) < _JOINED_PERCENT:
        other = _filled(pick(talk["questions"], split, rng), split, rng)
        phrase = phrase.rstrip("!.?") + rng.choice((", ", " ", "! ", ". ")) + other
    if "named" in talk and rng.randrange(100) < _NAMED_PERCENT:
        end = phrase[-1] if phrase[-1] in "!.?" else ""
        phrase = f"{phrase.rstrip('!.?')} {rng.choice(_file()['extra']['tails'])}{end}"
    return phrase


def _filled(template: str, split: str, rng: random.Random) -> str:
    words = spelling.words_of(split, longest=spelling.GRADES[LAST_GRADE][0])
    while "{word}" in template:
        template = template.replace("{word}", rng.choice(words), 1)
    return template.replace("{name}", rng.choice(_file()["extra"]["names"]))


def _unknown(split: str, rng: random.Random) -> Conversation:
    fillers = _file()["fillers"]
    while True:
        kind = rng.choice(("questions", "questions", "requests"))
        template = pick(_file()["unknown"][kind], split, rng)
        about = {name: rng.choice(values) for name, values in fillers.items()}
        text = _filled(template, split, rng).format(**about)
        question = written(text, rng)
        # Held out by what stands in the braces; without braces, by the writing.
        names = [name for name in fillers if f"{{{name}}}" in template]
        is_test = _is_test(about[names[0]] if names else question)
        if "{word}" in template or is_test == (split == "test"):
            answer = DONT_KNOW if kind == "questions" else CANNOT
            return one_turn(question, answer, kind="unknown")


_OF_WORDS = {"spell": spelling.spell, "count": spelling.count, "length": spelling.length}
_OF_NUMBERS = {"sum": sums.sum_turn, "truth": sums.truth_turn, "limit": sums.limit_turn}


def _is_test(text: str) -> bool:
    return is_held_out(f"{NAME}/{text}", percent=TEST_PERCENT)


@functools.cache
def _talks(kind: str) -> tuple[dict[str, Any], ...]:
    return tuple(talk for talk in _file()["talk"] if talk["kind"] == kind)


@functools.cache
def _file() -> dict[str, Any]:
    # Imported here: a plan loads this module and reads no talk.
    import tomllib

    return tomllib.loads(Path(__file__).with_name("talk.toml").read_text(encoding="ascii"))


TASK = GeneratedTask(
    name=NAME, generate=generate, grader=Grader(is_correct=is_correct, baseline=0.0)
)
