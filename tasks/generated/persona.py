"""Conversations of a model with a name, a character and facts of a user's own.

`persona.toml` has what people ask a model about itself; `tasks.generated.writing` gives a question
the forms in which people write it. The conversations are written to a file that the user may edit.
No stage imports this module.

Test conversations end with a question in words that no training conversation has.
"""

import functools
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.base import Conversation, one_turn, text_of
from tasks.generated import conversation, people
from tasks.generated.writing import written

MAX_TURNS = 3  # of a conversation that is about the model alone
_ADDED_PERCENT = 70  # of the mixed conversations that have room for one more turn
_GREETED_PERCENT = 10  # of the questions
_FRAMED_PERCENT = 15  # of the questions have words before them, as many of the others behind
_FORMER = "nanochat"  # the name in the conversations that are mixed in


@dataclass(frozen=True, kw_only=True)
class Persona:
    """What a model says of itself."""

    name: str
    maker: str = "nanochat-flows"
    character: str = "a tiny language model"  # "I am NAME, CHARACTER."
    facts: tuple[tuple[str, str], ...] = ()  # what it is about, and what is true


@dataclass(frozen=True, kw_only=True)
class _Topic:
    """One answer, the questions that get it, and words of other questions that it contradicts."""

    answer: str
    questions: Sequence[str]
    held_out: Sequence[str]
    words: Sequence[str]


def generate(
    persona: Persona, *, num_train: int, num_test: int, mixed: bool, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield lines of a file of conversations: messages and split.

    If `mixed`, the persona's turns are among those of the task `conversation`, instead of what that
    says of its own name and maker; else conversations are about the persona alone. The same
    arguments give the same lines. A test question is asked in no training conversation.
    """
    rng = random.Random(seed)
    topics = _topics(persona)
    asked: set[str] = set()
    bases = conversation.generate("train", num_train, grade=1, seed=seed) if mixed else None
    for _ in range(num_train):
        turns = [] if bases is None else _own_turns(next(bases), persona, topics, rng)
        if bases is None:
            count = rng.randint(1, MAX_TURNS)
            turns = [_turn(persona, topics, rng) for _ in range(count)]
        asked |= {_plain(turn["messages"][0]["content"]) for turn in turns}
        yield {"split": "train", "messages": conversation.join(turns)["messages"]}
    found: set[str] = set()
    bases = conversation.generate("test", num_test, grade=1, seed=seed) if mixed else None
    for _ in range(num_test):
        before = [] if bases is None else _others(next(bases), rng)
        while True:
            turn = _turn(persona, topics, rng, is_test=True)
            text = turn["messages"][0]["content"]
            if _plain(text) not in asked and text not in found:
                break
        found.add(text)
        yield {"split": "test", "messages": conversation.join([*before, turn])["messages"]}


def _plain(text: str) -> str:
    """Return a question without capitals and punctuation, in which its writings differ."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _own_turns(
    base: Conversation, persona: Persona, topics: Sequence[_Topic], rng: random.Random
) -> list[Conversation]:
    """Return a conversation's turns, those about the persona in its own words, perhaps one more."""
    turns = [
        turn if _agrees(turn, topics) else _turn(persona, topics, rng) for turn in _turns_of(base)
    ]
    if len(turns) < conversation.MAX_TURNS and rng.randrange(100) < _ADDED_PERCENT:
        turns.insert(rng.randint(0, len(turns)), _turn(persona, topics, rng))
    for turn in turns:
        question = turn["messages"][0]
        if turn.get("kind") == "small talk":  # a greeting may have the name
            text = re.split(_FORMER, question["content"], flags=re.IGNORECASE)
            question["content"] = persona.name.join(text)
    return turns


def _others(base: Conversation, rng: random.Random) -> list[Conversation]:
    """Return some of a conversation's turns that are not about itself."""
    turns = [turn for turn in _turns_of(base) if turn["kind"] != "identity"]
    return turns[: rng.randrange(len(turns))]


def _turns_of(base: Conversation) -> list[Conversation]:
    messages = base["messages"]
    return [
        {**keys, "messages": messages[2 * at : 2 * at + 2]} for at, keys in enumerate(base["turns"])
    ]


def _agrees(turn: Conversation, topics: Sequence[_Topic]) -> bool:
    """Return whether a turn of the task `conversation` says nothing against the persona."""
    if turn["kind"] != "identity":
        return True
    question, answer = (text_of(message["content"]).lower() for message in turn["messages"])
    return _FORMER not in answer and not any(
        word in question for topic in topics for word in topic.words
    )


def _turn(
    persona: Persona, topics: Sequence[_Topic], rng: random.Random, *, is_test: bool = False
) -> Conversation:
    fillers = _file()["fillers"]
    [topic] = rng.choices(topics, [len(topic.questions) for topic in topics])
    while True:
        phrase = rng.choice(topic.held_out if is_test else topic.questions)
        if rng.randrange(100) < _FRAMED_PERCENT:
            phrase = rng.choice(fillers["before"]) + phrase
        elif rng.randrange(100) < _FRAMED_PERCENT:
            phrase = phrase.rstrip("?.!") + rng.choice(fillers["after"])
        if rng.randrange(100) < _GREETED_PERCENT:
            phrase = rng.choice(fillers["opening"]) + phrase
        about = {name: rng.choice(fillers[name]) for name in ("other", "company", "person")}
        about |= {"name": persona.name, "maker": persona.maker}
        text = written(phrase.format(**about), rng)
        # A name that is also a filler ("Max") would get both yes and no.
        is_other = "{other}" in phrase and about["other"].lower() in persona.name.lower()
        is_maker = "{company}" in phrase and about["company"].lower() in persona.maker.lower()
        if not (is_other or is_maker or text in people.texts()):
            return one_turn(text, topic.answer)


def topic_of(about: str) -> str:
    """Return what facts of one answer have in common: the first name of their topic.

    Its own name for a fact without a topic of its own.
    """
    topics: list[list[str]] = [entry.get("fact", []) for entry in _file()["topic"]]
    return next((names[0] for names in topics if about in names), about)


@functools.cache
def _topics(persona: Persona) -> tuple[_Topic, ...]:
    """Return the topics of a persona, with their answers filled in."""
    facts = dict(persona.facts)
    found: list[_Topic] = []
    for entry in _file()["topic"]:
        names = entry.get("fact")
        fact = next((name for name in names or () if name in facts), None)
        if names is None or fact is not None:
            found.append(_filled(entry, persona, value=facts.pop(fact or "", "")))
    found += [
        _filled(_file()["other"], persona, topic=topic, value=value)
        for topic, value in facts.items()
    ]
    return tuple(found)


def _filled(entry: dict[str, Any], persona: Persona, *, value: str, topic: str = "") -> _Topic:
    values = {"name": persona.name, "maker": persona.maker, "character": persona.character}
    questions, held_out = (
        [text.replace("{topic}", topic) for text in entry[key]] for key in ("questions", "held_out")
    )
    answer = entry["answer"].format(**values, topic=topic, value=value)
    words = entry.get("words", [topic.split()[-1].lower()] if topic else [])
    # At the beginning of a sentence: a maker may be "my uncle".
    answer = answer[:1].upper() + answer[1:]
    return _Topic(answer=answer, questions=questions, held_out=held_out, words=words)


@functools.cache
def _file() -> dict[str, Any]:
    text = Path(__file__).with_name("persona.toml").read_text(encoding="ascii")
    return tomllib.loads(text)
