"""Two drills for letters: spelling a word, and counting a letter manually and by calculator.

`simple_spelling` is the drill alone, in one wording, for hundreds of thousands of examples:

    Spell the word: apple        apple:a,p,p,l,e

`spelling_bee` applies it. Its answer spells the word, counts while it lists the letters, and checks
the count with the calculator: two ways to the number, of which reinforcement learning may prefer
one.

Words and splits are those of `tasks.generated.spelling`. Questions may repeat here, as there are
more of them than words.
"""

import random
from collections.abc import Iterator

from tasks.base import Conversation, Part, check_split, is_first_number, one_turn
from tasks.generated.spelling import ABSENT_PERCENT, ALPHABET, COUNT_QUESTIONS, QUOTES, words_of
from tasks.kinds.sources import GeneratedTask, Grader

LONGEST = 30  # letters; no word of the list is longer
_NO_QUESTION_MARK_PERCENT = 50
_LOWER_CASE_PERCENT = 30


def generate_spelling(
    split: str, num_examples: int, *, grade: int, seed: int
) -> Iterator[Conversation]:
    """Yield words to spell. There is one grade; `grade` is ignored."""
    for rng in _streams(split, num_examples, seed):
        word = rng.choice(words_of(split, longest=LONGEST))
        yield one_turn(f"Spell the word: {word}", f"{word}:{','.join(word)}", word=word)


def is_spelled(conversation: Conversation, answer: str) -> bool:
    """Return whether the letters after the last colon are the word's."""
    letters = answer.rpartition(":")[2].strip().split(",")
    return letters == list(conversation["word"])


def generate_bee(split: str, num_examples: int, *, grade: int, seed: int) -> Iterator[Conversation]:
    """Yield letters to count. There is one grade; `grade` is ignored."""
    for rng in _streams(split, num_examples, seed):
        word = rng.choice(words_of(split, longest=LONGEST))
        letter = rng.choice(ALPHABET if rng.randrange(100) < ABSENT_PERCENT else word)
        question = _question(rng, word, letter)
        yield one_turn(question, _answer(word, letter), answer=str(word.count(letter)))


def _streams(split: str, num_examples: int, seed: int) -> Iterator[random.Random]:
    """Yield a random generator for each example."""
    check_split(split)
    # One per example, so that a smaller number of examples is a prefix of a larger one.
    first = random.Random(seed)
    return (random.Random(first.getrandbits(64)) for _ in range(num_examples))


def _question(rng: random.Random, word: str, letter: str) -> str:
    template = rng.choice(COUNT_QUESTIONS)
    if rng.randrange(100) >= _LOWER_CASE_PERCENT:
        template = template[0].upper() + template[1:]
    if rng.randrange(100) < _NO_QUESTION_MARK_PERCENT:
        template = template.removesuffix("?")
    asked = rng.choice(QUOTES).format(letter)
    return template.format(word=rng.choice(QUOTES).format(word), letter=asked, letters=asked)


def _answer(word: str, letter: str) -> list[Part]:
    lines = [f"{word}:{','.join(word)}", "", f"Counting {letter}:"]
    count = 0
    for place, found in enumerate(word, start=1):
        count += found == letter
        # No space before the letter: with one it would be another token than in the word.
        lines.append(f"{place}:{found}" + (f" that is {count}" if found == letter else ""))
    lines += ["", f"By hand: {count}. By calculator: "]
    return [
        {"type": "text", "text": "\n".join(lines)},
        {"type": "python", "text": f"'{word}'.count('{letter}')"},
        {"type": "python_output", "text": str(count)},
        {"type": "text", "text": f"\n\n#### {count}"},
    ]


SIMPLE = GeneratedTask(
    name="simple_spelling",
    generate=generate_spelling,
    grader=Grader(is_correct=is_spelled, baseline=0.0),
)
BEE = GeneratedTask(
    name="spelling_bee",
    generate=generate_bee,
    grader=Grader(is_correct=is_first_number, baseline=0.0),
)
