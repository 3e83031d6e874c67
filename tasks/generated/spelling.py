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
from tasks.generated import people
from tasks.generated.writing import ASKING, pick, written
from tasks.kinds.sources import GeneratedTask, Grader

NAME = "spelling"

# grade -> longest word, share of questions that ask for a count
GRADES = {1: (5, 0.15), 2: (7, 0.35), 3: (10, 0.5)}
TEST_PERCENT = 10  # of the words
ABSENT_PERCENT = 10  # of the counts ask for a letter that is not in the word

SPELL_REQUESTS = (
    *("spell {word}.", "spell the word {word}.", "spell the word: {word}", "spell out {word}."),
    *("spell {word} for me.", "spell {word} letter by letter.", "write the letters of {word}."),
    *("list the letters of {word}.", "tell me how to spell {word}.", "spell: {word}"),
    *("give me the letters in {word}.", "say the letters of the word {word}.", "spell {word}"),
    *("show me how {word} is spelled.", "give me the spelling of {word}.", "spell {word}"),
    *("break {word} into letters.", "spell out the word {word}.", "show the letters of {word}."),
    *("help me spell {word}.", "tell me the spelling of {word}.", "write {word} letter by letter."),
    *("say {word} letter by letter.", "split {word} into letters.", "spell this word: {word}"),
    *("tell me the letters in {word}.", "tell me how {word} is written."),
)
SPELL_QUESTIONS = (
    *("how do you spell {word}?", "how is {word} spelled?", "how is the word {word} spelled?"),
    *("what is the spelling of {word}?", "what are the letters of {word}?", "{word} spelling"),
    *("what letters make up the word {word}?", "which letters are in {word}, in order?"),
    *("spelling of {word}?", "how do i spell {word}?", "how do you spell the word {word}?"),
    *("how would you spell {word}?", "how to spell {word}?"),
    *("how do you write {word}?", "what is the correct spelling of {word}?"),
    *("what letters are in {word}?", "what are the letters in the word {word}?"),
    *(
        "do you know how to spell {word}?",
        "i forgot how to spell {word}.",
        "how is {word} written?",
    ),
    *(
        "i need the spelling of {word}.",
        "how does one spell {word}?",
        "how do people spell {word}?",
    ),
    *("what is the right way to spell {word}?", "how should i spell {word}?", "{word} spelled out"),
)
# {letters} may be a plural: r's, Rs.
COUNT_REQUESTS = (
    *("count the letter {letter} in {word}.", "count every {letter} in {word}."),
    *("tell me how many {letters} are in {word}.", "count the {letters} in {word}."),
    *("count how often {letter} appears in {word}.", "count {letters} in {word}."),
    *("find how many times {letter} is in {word}.", "count all the {letters} in {word}."),
    *("say how many {letters} the word {word} has.", "count the {letters} in the word {word}."),
    *("tell me the number of {letters} in {word}.", "count how many {letters} are in {word}."),
    *("count how many times {letter} is in {word}.", "count how many {letters} {word} has."),
)
COUNT_QUESTIONS = (
    *("how many {letters} are in {word}?", "how many letters {letter} are in {word}?"),
    *("how many {letters} are in the word {word}?", "how many {letters} in {word}?"),
    *("how many times does {letter} appear in {word}?", "how many {letters} are there in {word}?"),
    *("how many times is the letter {letter} in {word}?", "how often is {letter} in {word}?"),
    *("how often does {letter} occur in {word}?", "how many {letters} does {word} have?"),
    *("what is the number of {letters} in {word}?", "in {word}, how many {letters} are there?"),
    *("how many times does the letter {letter} appear in the word {word}?",),
    *("how often does the letter {letter} appear in {word}?", "number of {letters} in {word}?"),
    *("how many times is {letter} in {word}?", "how many {letters} does the word {word} have?"),
    *(
        "how many times do you see {letter} in {word}?",
        "how many {letters} can you find in {word}?",
    ),
)
LENGTH_REQUESTS = (
    *(
        "count the letters in {word}.",
        "count the letters of {word}.",
        "count all letters of {word}.",
    ),
    *("count the letters in the word {word}.", "count all the letters in {word}."),
    *("tell me how many letters {word} has.", "tell me how many letters are in {word}."),
    *("count how many letters are in {word}.", "count how many letters {word} has."),
    *("tell me the number of letters in {word}.", "count the characters in {word}."),
    *("tell me how long the word {word} is.", "count how many letters the word {word} has."),
)
LENGTH_QUESTIONS = (
    *("how many letters are in {word}?", "how many letters are in the word {word}?"),
    *("how many letters does {word} have?", "how many letters in {word}?", "length of {word}?"),
    *("how many letters does the word {word} have?", "how long is the word {word}?"),
    *("what is the length of {word}?", "number of letters in {word}?", "how long is {word}?"),
    *("what is the number of letters in {word}?", "how many characters are in {word}?"),
    *("how many letters are there in {word}?", "how many letters is {word}?"),
    *("how many letters has {word}?",),
)
PLURALS = ("{}", "{}'s", "{}s", "{}", "letter {}", "letters {}")
QUOTES = ("{}", "{}", "{}", "'{}'", '"{}"')
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
    if conversation["kind"] in ("count", "length"):
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
    return word in people.words() or is_held_out(f"{NAME}/{word}", percent=TEST_PERCENT)


def _stream(split: str, grade: int, rng: random.Random) -> Iterator[Conversation]:
    longest, count_share = GRADES[grade]
    words = words_of(split, longest=longest)
    while True:
        word = rng.choice(words)
        if rng.random() >= count_share:
            yield spell(word, split, rng)
        else:
            yield length(word, split, rng) if rng.randrange(3) == 0 else count(word, split, rng)


def spell(word: str, split: str, rng: random.Random) -> Conversation:
    """Return a request to spell the word, and its answer."""
    question = _phrase(SPELL_REQUESTS, SPELL_QUESTIONS, split, rng, word=word)
    return one_turn(question, f"{word}: {','.join(word)}", kind="spell", word=word)


def count(word: str, split: str, rng: random.Random) -> Conversation:
    """Return a request to count a letter of the word, and its answer."""
    absent = rng.randrange(100) < ABSENT_PERCENT
    letter = rng.choice([c for c in ALPHABET if c not in word] if absent else word)
    number = str(word.count(letter))
    question = _phrase(COUNT_REQUESTS, COUNT_QUESTIONS, split, rng, word=word, letter=letter)
    answer = parts_of(f'<<"{word}".count("{letter}")={number}>>#### {number}')
    return one_turn(question, answer, kind="count", word=word, letter=letter, answer=number)


def length(word: str, split: str, rng: random.Random) -> Conversation:
    """Return a request to count all letters of the word, and its answer."""
    number = str(len(word))
    question = _phrase(LENGTH_REQUESTS, LENGTH_QUESTIONS, split, rng, word=word)
    # Python finds "" before and after each letter, once more than there are letters.
    answer = parts_of(f'<<"{word}".count("")-1={number}>>#### {number}')
    return one_turn(question, answer, kind="length", word=word, answer=number)


def _phrase(
    requests: tuple[str, ...],
    questions: tuple[str, ...],
    split: str,
    rng: random.Random,
    **values: str,
) -> str:
    """Return a request or a question, as people write it."""
    quotes = rng.choice(QUOTES)
    if "letter" in values:
        letter = values["letter"].upper() if rng.randrange(5) == 0 else values["letter"]
        plural = rng.choice(PLURALS) if quotes == "{}" else quotes
        values |= {"letter": quotes.format(letter), "letters": plural.format(letter)}
    word = values["word"]
    shown = rng.choice((*[word] * 10, word.capitalize(), word.upper()))
    values["word"] = quotes.format(shown)
    if rng.randrange(2):
        return written(pick(questions, split, rng).format(**values), rng)
    request = pick(requests, split, rng).format(**values)
    if rng.randrange(2):
        request = pick(ASKING, split, rng) + request.rstrip(".") + rng.choice(("?", "?", "", "."))
    return written(request, rng)


TASK = GeneratedTask(
    name=NAME, generate=generate, grader=Grader(is_correct=is_correct, baseline=0.0)
)
