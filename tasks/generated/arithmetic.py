"""Synthetic word problems with a calculator, in the format of the GSM8K dataset.

    Tom has 7 apples and buys 5 more. How many apples does Tom have?      <<7+5=12>>#### 12

`<<7+5=12>>` is a call of the calculator and its result; the last line is `#### n`.

Grade 1 has one sum or difference of numbers from 2 to 20, in the order of the question, and an
answer without words; grade 2 one sum, difference or product of numbers up to 99; grade 3 two or
three steps. Train and test share all words and numbers, but a question's set of numbers is in one
split only: a hash decides, independent of order, grade, story and seed.
"""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

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
from tasks.generated.stories import CLOSINGS, NAMES, OBJECTS, OPENINGS, STEPS, STORIES
from tasks.kinds.sources import GeneratedTask, Grader

NAME = "arithmetic"
GRADES = (1, 2, 3)
TEST_PERCENT = 20  # of the sets of numbers


@dataclass(frozen=True)
class Problem:
    """A question, and its answer as text with `<<expression=result>>` calls."""

    numbers: tuple[int, ...]  # in the question
    question: str
    working: str
    result: int


def generate(split: str, num_examples: int, *, grade: int, seed: int) -> Iterator[Conversation]:
    """Yield distinct word problems; the grader's key is "answer".

    Raises TaskError for an unknown split or grade, or for more examples than there are questions.
    """
    check_split(split)
    if grade not in GRADES:
        raise TaskError(f"{NAME} has no grade {grade} (1 to {max(GRADES)})")
    what = f"{NAME} of grade {grade}, {split},"
    return distinct(_stream(split, grade, random.Random(seed)), num_examples, what=what)


@functools.cache
def split_of(numbers: tuple[int, ...]) -> str:
    """Return the split to which questions with exactly these numbers belong, in any order."""
    # Sorted, so that 3+5 in training does not give away 5+3 in testing.
    key = tuple(sorted(numbers))
    is_test = key in people.numbers() or is_held_out(
        f"{NAME}/{','.join(map(str, key))}", percent=TEST_PERCENT
    )
    return "test" if is_test else "train"


def _stream(split: str, grade: int, rng: random.Random) -> Iterator[Conversation]:
    make = {1: _one_small_step, 2: _one_step, 3: _several_steps}[grade]
    while True:
        problem = make(rng, split)
        answer = parts_of(f"{problem.working}#### {problem.result}")
        yield one_turn(problem.question, answer, answer=str(problem.result))


def story(split: str, rng: random.Random) -> Conversation:
    """Return a small problem with numbers up to 99: a turn of a conversation."""
    problem = _one_step(rng, split, signs="+-+-*", largest=rng.choice((20, 99)), in_words=False)
    answer = parts_of(f"{problem.working}#### {problem.result}")
    return one_turn(problem.question, answer, answer=str(problem.result))


def _one_small_step(rng: random.Random, split: str) -> Problem:
    return _one_step(rng, split, signs="+-", largest=20, in_words=False)


def _one_step(
    rng: random.Random, split: str, *, signs: str = "+-*", largest: int = 99, in_words: bool = True
) -> Problem:
    sign = rng.choice(signs)
    a, b = operands(rng, split, sign, largest=largest)
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    question = rng.choice(STORIES[sign]).format(a=a, b=b, name=name, things=thing)
    result = apply(a, sign, b)
    call = f"<<{a}{sign}{b}={result}>>"
    working = f"{a}{sign}{b} = {call}{result}\n" if in_words else call
    return Problem((a, b), question, working, result)


def _several_steps(rng: random.Random, split: str) -> Problem:
    """Return a problem whose first amount changes two or three times."""
    name, thing = rng.choice(NAMES), rng.choice(OBJECTS)
    while True:
        signs = [rng.choice("+-*") for _ in range(rng.choice((2, 2, 3)))]
        numbers = _chain(rng, signs)
        if numbers is not None and split_of(numbers) == split:
            break
    total = numbers[0]
    sentences = [rng.choice(OPENINGS).format(a=total, name=name, things=thing)]
    lines: list[str] = []
    for sign, b in zip(signs, numbers[1:], strict=True):
        event, remark = rng.choice(STEPS[sign])
        sentences.append(event.format(b=b, name=name, things=thing))
        result = apply(total, sign, b)
        call = f"{total}{sign}{b} = <<{total}{sign}{b}={result}>>{result}"
        lines.append(remark.format(call=call, name=name, things=thing) + "\n")
        total = result
    sentences.append(rng.choice(CLOSINGS).format(name=name, things=thing))
    return Problem(numbers, " ".join(sentences), "".join(lines), total)


def _chain(rng: random.Random, signs: list[str]) -> tuple[int, ...] | None:
    """Return a first amount and one number per step, or None if an amount would leave 1 to 999."""
    total = rng.randint(2, 99)
    numbers = [total]
    for sign in signs:
        b = rng.randint(2, 5) if sign == "*" else rng.randint(2, 60)
        total = apply(total, sign, b)
        if not 1 <= total <= 999:
            return None
        numbers.append(b)
    return tuple(numbers)


def operands(rng: random.Random, split: str, sign: str, *, largest: int) -> tuple[int, int]:
    """Return two numbers of the split, from 2 to `largest`; a difference is never negative."""
    # Drawn until a pair is in the split: the other four fifths or one fifth are rejected.
    while True:
        if sign == "*":
            a, b = rng.randint(2, 20), rng.randint(2, 9)
        else:
            a, b = rng.randint(2, largest), rng.randint(2, largest)
        if sign == "-" and a < b:
            a, b = b, a
        if split_of((a, b)) == split:
            return a, b


def apply(a: int, sign: str, b: int) -> int:
    """Return the sum, difference or product."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


TASK = GeneratedTask(
    name=NAME, generate=generate, grader=Grader(is_correct=is_final_number, baseline=0.0)
)
