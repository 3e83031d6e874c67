"""Spelling words and counting their letters, which is hard for a model that reads tokens.

Two kinds of question. *Spell*: the answer is the word and its letters, `apple: a,p,p,l,e`. *Count*:
below the spelling the calculator counts, `<<"apple".count("p")=2>>#### 2`.

A word is in one split only: a hash divides `words.txt`, our own list.
"""

import functools
import random
import re
from collections.abc import Iterator
from pathlib import Path

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
from tasks.kinds.sources import GeneratedTask, Grader

NAME = "spelling"

# grade -> longest word, share of questions that ask for a count
GRADES = {1: (5, 0.15), 2: (7, 0.35), 3: (10, 0.5)}
TEST_PERCENT = 10  # of the words
ABSENT_PERCENT = 10  # of the counts ask for a letter that is not in the word

OPENINGS = ("", "Please ", "Can you ", "Could you ", "Now ", "Hi! ", "I need help: ", "Quick: ")
SPELL_QUESTIONS = (
    "spell {word}",
    "spell the word {word}",
    "spell the word: {word}",
    "spell out {word}",
    "spell {word} for me",
    "spell {word} letter by letter",
    "write the letters of {word}",
    "list the letters of {word}",
    "tell me how to spell {word}",
    "give me the letters in {word}",
    "say the letters of the word {word}",
    "show how {word} is spelled",
)
SPELL_DIRECT = (
    "How do you spell {word}?",
    "How is {word} spelled?",
    "How is the word {word} spelled?",
    "What is the spelling of {word}?",
    "What are the letters of {word}?",
    "What letters make up the word {word}?",
    "Which letters are in {word}, in order?",
    "Spelling of {word}?",
)
COUNT_QUESTIONS = (
    "count the letter {letter} in {word}",
    "count every {letter} in {word}",
    "tell me how many {letter} are in {word}",
    "count how often {letter} appears in {word}",
    "find how many times {letter} is in {word}",
    "say how many {letter} the word {word} has",
)
COUNT_DIRECT = (
    "How many {letter} are in {word}?",
    "How many letters {letter} are in {word}?",
    "How many {letter} are in the word {word}?",
    "How many times does {letter} appear in {word}?",
    "How many times is the letter {letter} in {word}?",
    "How often does {letter} occur in {word}?",
    "What is the number of {letter} in {word}?",
)
QUOTES = ("{}", "'{}'", '"{}"')
ALPHABET = "abcdefghijklmnopqrstuvwxyz"

_SEPARATORS = re.compile(r"[\s,.-]+")


def generate(split: str, num_examples: int, *, grade: int, seed: int) -> Iterator[Conversation]:
    """Yield distinct questions about words of at most the grade's length.

    Keys for the grader: "kind" ("spell" or "count"), "word", and for a count "letter" and "answer".
    Raises TaskError for an unknown split or grade, or for more examples than there are questions.
    """
    check_split(split)
    if grade not in GRADES:
        raise TaskError(f"{NAME} has no grade {grade} (1 to {max(GRADES)})")
    what = f"{NAME} of grade {grade}, {split},"
    return distinct(_stream(split, grade, random.Random(seed)), num_examples, what=what)


def is_correct(conversation: Conversation, answer: str) -> bool:
    """Return whether the letters after the last colon, or the `#### n` of a count, are right."""
    if conversation["kind"] == "count":
        # By the number alone: the spelling above it is not graded.
        return is_final_number(conversation, answer)
    letters = _SEPARATORS.split(answer.rpartition(":")[2].strip(" \n.,-").lower())
    return letters == list(conversation["word"])


@functools.cache
def words_of(split: str, *, longest: int) -> tuple[str, ...]:
    """Return the words of a split with at most `longest` letters, sorted."""
    return tuple(w for w in _words() if len(w) <= longest and is_test(w) == (split == "test"))


@functools.cache
def _words() -> tuple[str, ...]:
    return tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())


def is_test(word: str) -> bool:
    """Return whether a word, of the list or not, belongs to the test split."""
    return is_held_out(f"{NAME}/{word}", percent=TEST_PERCENT)


def _stream(split: str, grade: int, rng: random.Random) -> Iterator[Conversation]:
    longest, count_share = GRADES[grade]
    words = words_of(split, longest=longest)
    while True:
        word = rng.choice(words)
        yield count(word, rng) if rng.random() < count_share else spell(word, rng)


def spell(word: str, rng: random.Random) -> Conversation:
    """Return a request to spell the word, and its answer."""
    question = _phrase(SPELL_QUESTIONS, SPELL_DIRECT, rng, word=word)
    return one_turn(question, f"{word}: {','.join(word)}", kind="spell", word=word)


def count(word: str, rng: random.Random) -> Conversation:
    """Return a request to count a letter of the word, and its answer."""
    absent = rng.randrange(100) < ABSENT_PERCENT
    letter = rng.choice([c for c in ALPHABET if c not in word] if absent else word)
    number = str(word.count(letter))
    question = _phrase(COUNT_QUESTIONS, COUNT_DIRECT, rng, word=word, letter=letter)
    call = f'<<"{word}".count("{letter}")={number}>>'
    answer = parts_of(f"{word}: {','.join(word)}\n{call}#### {number}")
    return one_turn(question, answer, kind="count", word=word, letter=letter, answer=number)


def _phrase(
    requests: tuple[str, ...], direct: tuple[str, ...], rng: random.Random, **values: str
) -> str:
    """Return a request ("Please spell X.") or a direct question, its values in equal quotes."""
    quotes = rng.choice(QUOTES)
    values = {name: quotes.format(value) for name, value in values.items()}
    template = rng.choice((*requests, *direct))
    if template in direct:
        return template.format(**values)
    opening = rng.choice(OPENINGS)
    text = opening + template.format(**values)
    end = "?" if opening.startswith(("Can", "Could")) else rng.choice(("", "."))
    return text[0].upper() + text[1:] + end


TASK = GeneratedTask(
    name=NAME, generate=generate, grader=Grader(is_correct=is_correct, baseline=0.0)
)
