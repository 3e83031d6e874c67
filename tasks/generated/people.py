"""Sixty questions as people type them, with what a fair person accepts: `people.toml`.

They were written by someone who had not seen the generators. Training data has none of them: no
question with the same text, no word that one asks to spell or to count, no numbers of one.
`python -m bench.people MODEL` asks a model all of them.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

# An honest answer to what is out of reach.
_LIMIT = re.compile(
    r"\b(do not know|don't know|cannot|can't|not able|unable|only .*up to|too large)\b", re.I
)
_OF_WORDS = ("spell", "count")


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a person types in a fresh chat, and how the answer is graded."""

    text: str
    kind: str  # sum, true_false, spell, count, self, talk, beyond
    accept: tuple[re.Pattern[str], ...]  # right if one is found in the answer as people see it,
    reject: tuple[re.Pattern[str], ...]  # and none of these
    limit: bool  # "I do not know" and its like are right as well

    def is_right(self, answer: str) -> bool:
        """Return whether a fair person accepts `answer`, plain text without calculator calls."""
        if any(pattern.search(answer) for pattern in self.reject):
            return False
        fits = any(pattern.search(answer) for pattern in self.accept)
        return fits or (self.limit and _LIMIT.search(answer) is not None)


@functools.cache
def questions() -> tuple[Question, ...]:
    """Return the questions of `people.toml`, in its order."""
    return read_questions(Path(__file__).with_name("people.toml"))


def read_questions(path: Path) -> tuple[Question, ...]:
    """Return the questions of a file like `people.toml`, in its order."""
    # Imported here: a plan loads this module and reads no questions.
    import tomllib

    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(
        Question(
            text=entry["text"],
            kind=entry["kind"],
            accept=_patterns(entry["accept"]),
            reject=_patterns(entry.get("reject", [])),
            limit=entry.get("limit", False),
        )
        for entry in tree["question"]
    )


@functools.cache
def texts() -> frozenset[str]:
    """Return the questions' texts."""
    return frozenset(question.text for question in questions())


@functools.cache
def words() -> frozenset[str]:
    """Return all words, in lower case, of the questions that ask for letters."""
    asked = (q.text for q in questions() if q.kind in _OF_WORDS)
    return frozenset(word for text in asked for word in re.findall(r"[a-z]+", text.lower()))


@functools.cache
def numbers() -> frozenset[tuple[int, ...]]:
    """Return the sorted numbers of each sum; of a true or false one without what it claims."""
    found = {q: tuple(map(int, re.findall(r"\d+", q.text.replace(",", "")))) for q in questions()}
    sums = (n[:-1] if q.kind == "true_false" else n for q, n in found.items())
    return frozenset(tuple(sorted(n)) for n in sums if len(n) > 1)


def _patterns(sources: list[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(source, re.IGNORECASE) for source in sources)
