"""Turns of conversation about numbers: sums, whether a sum is true, and what is out of reach.

    what is 3 + 4 + 5?      <<3+4+5=12>>#### 12
    is 7 + 5 = 13?          <<7+5-13=-1>>No, that is false.
    what is 84 / 7?         I can only do sums up to 999.

Whole numbers up to 999, two or three of them, no negative result. The calculator computes; the
model learns to copy the numbers and to find the signs.
"""

import random
from collections.abc import Sequence

from tasks.base import Conversation, one_turn, parts_of
from tasks.generated import arithmetic
from tasks.generated.writing import ASKING, pick, written

LARGEST = 999
SIGN_WORDS = {
    "+": ("plus",),
    "-": ("minus", "minus", "minus", "take away"),
    "*": ("times", "times", "times", "multiplied by"),
}
_DRAWN = {"train": "++--**", "test": "++--*"}  # words for products have more to learn
SIGNS = {"+": ("+",), "-": ("-",), "*": ("*", "x", "*")}
ASKED = (
    *("what is {sum}?", "how much is {sum}?", "what does {sum} make?", "{sum}?", "{sum} ="),
    *("{sum}", "what is {sum}?", "how much does {sum} make?", "what do you get for {sum}?"),
    *("what is the result of {sum}?", "what does {sum} equal?"),
    *("do you know what {sum} is?", "how many is {sum}?", "what is the answer to {sum}?"),
    *("i need to know what {sum} is.", "what would {sum} be?", "{sum} equals?", "{sum} makes?"),
)
REQUESTS = (
    *("compute {sum}.", "calculate {sum}.", "work out {sum}.", "do {sum}.", "solve {sum}."),
    *("tell me what {sum} is.", "add this up: {sum}.", "figure out {sum}.", "tell me {sum}."),
    *(
        "do {sum} for me.",
        "calculate {sum} for me.",
        "help me with {sum}.",
        "work out {sum} for me.",
    ),
)
IN_WORDS = {  # of two numbers
    "+": (
        *("add {a} and {b}.", "add {a} to {b}.", "the sum of {a} and {b}?", "sum {a} and {b}."),
        *("what is the sum of {a} and {b}?", "what do you get if you add {a} and {b}?"),
    ),
    "-": (
        *("subtract {b} from {a}.", "take {b} from {a}.", "take {b} away from {a}."),
        *("what is the difference between {a} and {b}?", "what is {a} without {b}?"),
        *("what do you get if you subtract {b} from {a}?",),
    ),
    "*": (
        *("multiply {a} by {b}.", "multiply {a} and {b}.", "the product of {a} and {b}?"),
        *("what is the product of {a} and {b}?", "what do you get if you multiply {a} by {b}?"),
        *("multiply {a} with {b}.", "what is {a} multiplied with {b}?"),
    ),
}
ADD_THREE = ("add {a}, {b} and {c}.", "add {a} and {b} and {c}.", "the sum of {a}, {b} and {c}?")
CLAIMS = (
    *("is {sum} = {c}?", "is {sum} equal to {c}?", "does {sum} equal {c}?"),
    *("does {sum} make {c}?", "true or false: {sum} = {c}", "true or false? {sum} = {c}"),
    *("is it true that {sum} = {c}?", "is it true that {sum} is {c}?", "{sum} = {c}, right?"),
    *("{sum} = {c}, true or false?", "is {sum} = {c} true?", "is {sum} = {c} correct?"),
    *("{sum} is {c}, correct?", "{sum} is {c}, right?", "{sum} = {c}?", "is {sum} = {c} right?"),
    *("does {sum} = {c}?", "{sum} = {c} true or false?", "is this right: {sum} = {c}"),
    *("is this true: {sum} = {c}?", "i think {sum} is {c}. is that right?", "check {sum} = {c}."),
    *("correct or not: {sum} = {c}", "{sum} equals {c}, yes or no?", "do {sum} make {c}?"),
)
FALSE, TRUE = "No, that is false.", "Yes, that is true."
LIMIT = "I can only do sums up to 999."
BEYOND = (
    *(
        "what is {a} / {b}?",
        "{a} divided by {b}?",
        "what is {a} divided by {b}?",
        "divide {a} by {b}.",
    ),
    *("{a}/{b}", "what is the square root of {a}?", "what is {a} percent of {b}?", "{a} / {b} ="),
    *(
        "what is half of {a}?",
        "what is {a} squared?",
        "how much is {a} divided by {b}?",
        "{a} % of {b}",
    ),
    *("what is {a} to the power of {b}?", "what is a third of {a}?", "{a} ^ {b}", "is {a} prime?"),
)


def sum_turn(split: str, rng: random.Random, *, small: bool = False) -> Conversation:
    """Return a question for a sum, difference or product of two or three numbers, or a story.

    `small`: of two numbers up to 99.
    """
    if rng.randrange(6) == 0:
        return _story(split, rng)
    signs, numbers = _draw(split, rng, small)
    call, result = expression(signs, numbers)
    kind = rng.randrange(10)
    values = dict(zip("abc", map(str, numbers), strict=False))
    if kind < 2 and len(numbers) == 2:
        question = pick(IN_WORDS[signs[0]], split, rng).format(**values)
    elif kind < 5 and signs == "++":
        question = rng.choice(ADD_THREE).format(**values)
    elif kind < 7:
        question = pick(ASKED, split, rng).format(sum=_joined(signs, numbers, rng))
    else:
        question = pick(REQUESTS, split, rng).format(sum=_joined(signs, numbers, rng))
        if rng.randrange(2):
            question = pick(ASKING, split, rng) + question.rstrip(".") + rng.choice(("?", "", "."))
    answer = parts_of(f"<<{call}={result}>>#### {result}")
    return one_turn(written(question, rng), answer, kind="sum", answer=str(result))


def truth_turn(split: str, rng: random.Random, *, small: bool = False) -> Conversation:
    """Return a question whether a sum is right; half of them are."""
    while True:
        signs, numbers = _draw(split, rng, small)
        if len(numbers) == 2 or rng.randrange(4) == 0:
            break
    call, result = expression(signs, numbers)
    claim = result
    if rng.randrange(2):
        while claim == result or claim < 0:
            claim = rng.choice(
                (result + rng.choice((-10, -2, -1, 1, 2, 10)), rng.randint(1, 2 * result + 9))
            )
    question = pick(CLAIMS, split, rng).format(sum=_joined(signs, numbers, rng), c=claim)
    answer = parts_of(f"<<{call}-{claim}={result - claim}>>{TRUE if claim == result else FALSE}")
    return one_turn(written(question, rng), answer, kind="truth", answer=str(claim == result))


def is_true(turn: Conversation, answer: str) -> bool:
    """Return whether the answer to a `truth_turn` ends with the right one of its two sentences."""
    return answer.endswith(TRUE if turn["answer"] == "True" else FALSE)


def limit_turn(split: str, rng: random.Random, *, small: bool = False) -> Conversation:
    """Return a question that the calculator's lessons do not cover: division, large numbers."""
    while True:
        if rng.randrange(2):
            a, b = rng.randint(2, LARGEST), rng.randint(2, 99)
            template = pick(BEYOND, split, rng)
            question = template.format(a=a, b=b)
            numbers = (a, b) if "{b}" in template else (a,)
        else:
            a, b = _large(rng), rng.choice((_large(rng), rng.randint(2, LARGEST)))
            if rng.randrange(2):
                a, b = b, a
            sign = rng.choice("+-*")
            texts = [f"{n:,}" if rng.randrange(4) == 0 else str(n) for n in (a, b)]
            template = pick(rng.choice((ASKED, ASKED, REQUESTS)), split, rng)
            question = template.format(sum=_joined(sign, texts, rng))
            numbers = (a, b)
        if arithmetic.split_of(numbers) == split:
            return one_turn(written(question, rng), LIMIT, kind="limit", answer=LIMIT)


def _large(rng: random.Random) -> int:
    return (
        rng.randint(1, 9) * 10 ** rng.randint(3, 6)
        if rng.randrange(3) == 0
        else int("".join(rng.choice("123456789") for _ in range(rng.randint(4, 7))))
    )


def expression(signs: str, numbers: tuple[int, ...]) -> tuple[str, int]:
    """Return the call of the calculator, such as 3+4*5, and its value; products come first."""
    terms = [(1, numbers[0])]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            weight, value = terms[-1]
            terms[-1] = (weight, value * number)
        else:
            terms.append((1 if sign == "+" else -1, number))
    total = sum(weight * value for weight, value in terms)
    text = str(numbers[0]) + "".join(f"{s}{n}" for s, n in zip(signs, numbers[1:], strict=True))
    return text, total


def _joined(signs: str, numbers: Sequence[object], rng: random.Random) -> str:
    """Return the sum as people write it: signs or words, with or without blanks."""
    if rng.randrange(3) == 0:
        links = [f" {rng.choice(SIGN_WORDS[sign])} " for sign in signs]
    else:
        blank = rng.choice((" ", " ", ""))
        links = [f"{blank}{rng.choice(SIGNS[sign])}{blank}" for sign in signs]
    pairs = zip(links, numbers[1:], strict=True)
    return str(numbers[0]) + "".join(f"{link}{number}" for link, number in pairs)


def _draw(split: str, rng: random.Random, small: bool) -> tuple[str, tuple[int, ...]]:
    """Return the signs and numbers of a sum of the split that is never below 0."""
    while True:
        largest = rng.choice((12, 20, 50, 99, 99) if small else (12, 20, 50, 99, 99, LARGEST))
        signs = "".join(
            rng.choice(_DRAWN[split]) for _ in range(1 if small else rng.choice((1, 1, 1, 1, 2)))
        )
        factor = 12 if small else rng.choice((12, 12, 12, 99))
        numbers = tuple(
            rng.randint(2, min(largest, factor if i and signs[i - 1] == "*" else largest))
            for i in range(len(signs) + 1)
        )
        totals = [expression(signs[:i], numbers[: i + 1])[1] for i in range(1, len(numbers))]
        if min(totals) >= 0 and max(totals) < 10_000 and arithmetic.split_of(numbers) == split:
            return signs, numbers


def _story(split: str, rng: random.Random) -> Conversation:
    turn = arithmetic.story(split, rng)
    turn["messages"][0]["content"] = written(turn["messages"][0]["content"], rng)
    return {**turn, "kind": "sum"}
