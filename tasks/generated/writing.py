"""How people write a question: openings, contractions, capitals, punctuation, a word of thanks.

`written` gives one question many forms; `pick` chooses a phrase, usual ones more often.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# Before a question, and before a remark.
OPENINGS = (
    *("so, ", "and ", "now ", "well, ", "ok, ", "hi! ", "hm, ", "hey, ", "hello, ", "ok so "),
    *("quick question: ", "another one: ", "one more: ", "next: ", "alright, ", "hey, quick one: "),
)
REMARKING = ("ok, ", "oh, ", "well, ", "so, ", "hm, ", "ok ", "oh ", "hey, ", "alright, ", "haha, ")
ASKING = ("can you ", "could you ", "can u ", "could you please ", "please ", "would you ", "pls ")
CONTRACTIONS = (
    *(
        ("what is ", "what's "),
        ("what is ", "whats "),
        ("how is ", "how's "),
        ("who is ", "who's "),
    ),
    *(("do not ", "don't "), ("i am ", "i'm "), ("i am ", "im "), ("you are ", "you're ")),
    *(("let us ", "let's "), (" you ", " u "), (" you?", " u?"), ("cannot", "can't")),
    *(("thank you", "thank u"), ("that is", "that's"), ("it is", "it's"), ("okay", "ok")),
    *(("what is ", "what's "), ("what is ", "whats "), ("where is ", "where's ")),
)
_CONTRACTED = 30  # percent of the writings for which a contraction is looked up
_OPENED = 18  # percent
_POLITE = 8  # percent
_BIAS = {"train": 1.4, "test": 2.0}  # with 1 all phrases are as frequent


def written(text: str, rng: random.Random, *, openings: Sequence[str] = OPENINGS) -> str:
    """Return `text`, in lower case with its punctuation, as one person might write it."""
    if rng.randrange(100) < _CONTRACTED:
        long, short = rng.choice(CONTRACTIONS)
        text = text.replace(long, short, 1)
    if openings is OPENINGS and rng.randrange(100) < _POLITE:
        text = text.rstrip("?.!") + rng.choice((" please", ", please", " please?"))
    if rng.randrange(100) < _OPENED:
        text = rng.choice(openings) + text
    match rng.randrange(20):
        case 0:
            return text.upper() if rng.randrange(2) else text.upper().rstrip("?.!")
        case 1 | 2 | 3 | 4 | 5 | 6:
            return text.lower().rstrip("?.!")
        case 7 | 8 | 9:
            return text
        case 10 | 11:
            return _capital(text).rstrip("?.!")
        case 12:
            return _capital(text).rstrip("?.!") + rng.choice(("!", "??", "?", ".", " ?"))
    return _capital(text)


def pick(phrases: Sequence[T], split: str, rng: random.Random) -> T:
    """Return one of the phrases, which are listed from the usual to the rare: those less often.

    In training they are more alike: a rare phrase is answered right once it was seen a few times.
    """
    return phrases[int(len(phrases) * rng.random() ** _BIAS[split])]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
