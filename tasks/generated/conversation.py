"""Conversations of several turns, each of another kind: what a small chat model can hold.

Kinds of turn: *identity* (who it is), *small talk*, *spell*, *count* (letters), *sum* (with the
calculator) and *unknown* (an honest "I do not know"). The first two and the last are in
`talk.toml`; words and letters are those of `tasks.generated.spelling`.

Test conversations have five turns of five kinds. What they ask is not in training: no word, no
pair of numbers, nothing that an unknown question is about, and no question about itself or of
small talk in the same writing (a hash of each decides). The model answers every turn with its own
earlier answers in view; the grader sees one turn at a time (`turns` has its keys).
"""

import functools
import random
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
    parts_of,
)
from tasks.generated import arithmetic, spelling
from tasks.kinds.sources import GeneratedTask, Grader

NAME = "conversation"

# kind -> weight in training; a word has more to learn than a greeting
WEIGHTS = {"identity": 4, "small talk": 5, "spell": 8, "count": 4, "sum": 4, "unknown": 5}
MOST_TURNS = 5
TEST_PERCENT = 10  # of the ways to write a question of talk.toml, and of what `unknown` is about
INVENTED_PERCENT = 50  # of the words in training: the head of one word and the tail of another

# Of any question or remark; few have none held out, and none is held out whole.
OPENINGS = ("", "", "", "", "", "So, ", "And ", "Now ", "Well, ", "OK, ", "Hi! ", "Hm, ")
SUMS = (
    *("what is {a} {sign} {b}?", "how much is {a} {sign} {b}?", "{a} {sign} {b}?"),
    *("{a}{sign}{b}", "{a} {sign} {b} =", "compute {a} {sign} {b}.", "what is {a}{sign}{b}?"),
    *("what does {a} {sign} {b} make?", "calculate {a} {sign} {b}.", "{a} {word} {b}?"),
    *("what is {a} {word} {b}?", "how much is {a} {word} {b}?"),
)
SIGN_WORDS = {"+": "plus", "-": "minus", "*": "times"}
DONT_KNOW, CANNOT = "I do not know.", "I cannot do that."
OFFER = " Ask me to spell a word or to do a sum."


def generate(split: str, num_examples: int, *, grade: int, seed: int) -> Iterator[Conversation]:
    """Yield distinct conversations: one to five turns for training, five for testing.

    `grade` is that of the words to spell. The grader's key "turns" has one item for each turn: its
    "kind" and what grading it needs. Raises TaskError for an unknown split or grade.
    """
    check_split(split)
    if grade not in spelling.GRADES:
        raise TaskError(f"{NAME} has no grade {grade} (1 to {max(spelling.GRADES)})")
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
        case "spell" | "count":
            return spelling.is_correct(turn, answer)
        case "sum":
            return is_final_number(turn, answer)
        case "unknown":
            return answer.startswith((DONT_KNOW, CANNOT))
    return answer == turn["answer"]


def _stream(split: str, grade: int, rng: random.Random) -> Iterator[Conversation]:
    while True:
        if split == "test":
            kinds = rng.sample(list(WEIGHTS), MOST_TURNS)
        else:
            turns = rng.randint(1, MOST_TURNS)
            kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=turns)
        yield join([_turn(kind, split, grade, rng) for kind in kinds])


def join(turns: list[Conversation]) -> Conversation:
    """Return one conversation of several turns, their keys in "turns"."""
    return {
        "messages": [message for turn in turns for message in turn["messages"]],
        "turns": [{k: v for k, v in turn.items() if k != "messages"} for turn in turns],
    }


def _turn(kind: str, split: str, grade: int, rng: random.Random) -> Conversation:
    if kind in ("spell", "count"):
        make = spelling.spell if kind == "spell" else spelling.count
        return make(_word(split, grade, rng), rng)
    if kind == "sum":
        return _sum(split, rng)
    return _unknown(split, rng) if kind == "unknown" else _talk(kind, split, rng)


def _word(split: str, grade: int, rng: random.Random) -> str:
    longest, _ = spelling.GRADES[grade]
    words = spelling.words_of(split, longest=longest)
    if split == "test" or rng.randrange(100) >= INVENTED_PERCENT:
        return rng.choice(words)
    # Invented words show every piece of a word beside every other one: what a token is spelled
    # like is learnt from the words that have it, and the list has few words for some tokens.
    while True:
        first, second = rng.choice(words), rng.choice(words)
        word = first[: rng.randint(1, 4)] + second[rng.randint(1, 3) :]
        if 3 <= len(word) <= longest + 2 and not spelling.is_test(word):
            return word


def _sum(split: str, rng: random.Random) -> Conversation:
    sign = rng.choice("++--*")
    a, b = arithmetic.operands(rng, split, sign, largest=rng.choice((20, 99)))
    result = str(arithmetic.apply(a, sign, b))
    question = rng.choice(SUMS).format(a=a, b=b, sign=sign, word=SIGN_WORDS[sign])
    answer = parts_of(f"<<{a}{sign}{b}={result}>>#### {result}")
    return one_turn(_written(question, rng), answer, kind="sum", answer=result)


def _talk(kind: str, split: str, rng: random.Random) -> Conversation:
    questions = _questions(kind)
    while True:
        question, answer = rng.choice(questions)
        question = _written(question, rng)
        if _is_test(question) == (split == "test"):
            return one_turn(question, answer, kind=kind, answer=answer)


def _unknown(split: str, rng: random.Random) -> Conversation:
    fillers, words = _file()["fillers"], spelling.words_of(split, longest=spelling.GRADES[3][0])
    while True:
        key = rng.choice(("questions", "questions", "requests"))
        template = rng.choice(_file()["unknown"][key])
        about = {name: rng.choice(values) for name, values in (*fillers.items(), ("word", words))}
        written = _written(template.format(**about), rng)
        # Held out by what stands in the braces; without braces, by the writing.
        names = [name for name in fillers if f"{{{name}}}" in template]
        is_test = _is_test(about[names[0]] if names else written)
        if "{word}" in template or is_test == (split == "test"):
            return one_turn(
                written, (DONT_KNOW if key == "questions" else CANNOT) + OFFER, kind="unknown"
            )


def _written(question: str, rng: random.Random) -> str:
    """Return the question with an opening, in one of the ways in which people write."""
    opening = rng.choice(OPENINGS)
    style = rng.randrange(6)
    if style == 0:  # without capital and question mark
        return (opening + question).lower().rstrip("?.!")
    if style == 1:
        return opening + question
    text = opening + question
    return text[0].upper() + text[1:]


def _is_test(text: str) -> bool:
    return is_held_out(f"{NAME}/{text}", percent=TEST_PERCENT)


@functools.cache
def _questions(kind: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (question, talk["answer"])
        for talk in _file()["talk"]
        if talk["kind"] == kind
        for question in talk["questions"]
    )


@functools.cache
def _file() -> dict[str, Any]:
    # Imported here: a plan loads this module and reads no talk.
    import tomllib

    return tomllib.loads(Path(__file__).with_name("talk.toml").read_text(encoding="ascii"))


TASK = GeneratedTask(
    name=NAME, generate=generate, grader=Grader(is_correct=is_correct, baseline=0.0)
)
