"""Build the tokens of a CORE example: shots, question and options, and which tokens are scored.

Shots, separators and the start of an answer are as in nanochat, so that scores are comparable. The
answer's tokens are found by comparing token sequences, not in the text:

    multiple_choice      those after the common prefix of all options
    schema               those of the common suffix of all options
    language_modeling    those after the text without its continuation

If a task has fewer other examples than shots, all of them are the shots (nanochat raises).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nanochat_core.errors import DataError
from nanochat_core.evaluate.core_tasks import OPTIONS, CoreTask
from nanochat_core.model.trees import Tree

SHOT_SEED = 1234  # nanochat's; added to an example's index, it seeds the choice of its shots
BETWEEN = "\n\n"  # after a shot


class Encoder(Protocol):
    """What builds tokens of text: our tokenizer, or that of another model."""

    @property
    def bos(self) -> int:
        """The id that begins every text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Question:
    """One example as model input. Each row of the tree predicts one target."""

    tree: Tree
    targets: tuple[int, ...]  # a token for each of the tree's rows
    lengths: tuple[int, ...]  # number of targets of each text, in their order
    texts: tuple[int, ...]  # index of each option's text: equal options share one and tie exactly
    gold: int  # the right option; 0 if there is only one


def make_question(task: CoreTask, place: int, tokenizer: Encoder) -> Question:
    """Return the example at `place` of a task. Raises DataError if a continuation has no tokens."""
    shots, tails = render(task, place)
    sequences = encode(tokenizer, shots, tails)
    item = task.items[place]
    if task.kind == "multiple_choice":
        spans = [(shared_length(sequences), len(ids)) for ids in sequences]
    elif task.kind == "schema":
        common = shared_length([ids[::-1] for ids in sequences])
        spans = [(len(ids) - common, len(ids)) for ids in sequences]
    else:
        without, whole = sequences
        spans = [(shared_length([without, whole]), len(whole))]
        sequences = [whole]
    question = to_tree(sequences, spans, gold=item["gold"] if task.kind in OPTIONS else 0)
    if not question.targets and task.kind not in OPTIONS:
        raise DataError(f"example {place} of '{task.label}' has no continuation: {item!r}")
    return question


def shots_of(task: CoreTask, place: int) -> list[Mapping[str, Any]]:
    """Return the examples shown before the one at `place`, which is never among them."""
    # Drawn from the indices without `place`: those from `place` on are shifted by one.
    others = len(task.items) - 1
    chosen = random.Random(SHOT_SEED + place).sample(range(others), min(task.num_shots, others))
    return [task.items[i + (i >= place)] for i in chosen]


def render(task: CoreTask, place: int) -> tuple[str, list[str]]:
    """Return the text of the shots, and the texts after it: each option, or without and with the
    continuation."""
    golds = [(shot, shot["gold"] if task.kind in OPTIONS else 0) for shot in shots_of(task, place)]
    shots = "".join(f"{_texts(task, shot)[gold]}{BETWEEN}" for shot, gold in golds)
    item = task.items[place]
    texts = _texts(task, item)
    if task.kind in OPTIONS:
        return shots, texts
    without = f"{str(item['context']).strip()}{task.delimiter}"
    # nanochat strips the whole prompt, which begins with the question only if there are no shots.
    return shots, [without.rstrip() if shots else without.strip(), *texts]


def _texts(task: CoreTask, item: Mapping[str, Any]) -> list[str]:
    """Return an example with each of its options, or with its continuation."""
    if task.kind == "multiple_choice":
        return [f"{item['query']}{task.delimiter}{choice}" for choice in item["choices"]]
    after = f"{task.delimiter}{item['continuation']}"
    if task.kind == "schema":
        return [f"{context}{after}" for context in item["context_options"]]
    return [f"{str(item['context']).strip()}{after}"]


def encode(tokenizer: Encoder, shots: str, tails: Sequence[str]) -> list[list[int]]:
    """Return the ids of <|bos|> and of `shots` + tail for each of `tails`, encoded as one text."""
    # The shots end in line breaks. Before a visible character these end a piece of the split
    # pattern, which no token crosses, so the shots are encoded only once. The first text checks it.
    bos = [tokenizer.bos]
    if not shots or any(not tail or tail[0].isspace() for tail in tails):
        return [bos + tokenizer.encode(shots + tail) for tail in tails]
    last = [tokenizer.encode(tail) for tail in tails]
    first = tokenizer.encode(shots + tails[0])
    if first[len(first) - len(last[0]) :] != last[0]:
        return [bos + tokenizer.encode(shots + tail) for tail in tails]
    before = bos + first[: len(first) - len(last[0])]
    return [before + ids for ids in last]


def shared_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all sequences."""
    shortest = min(sequences, key=len)
    for i, token in enumerate(shortest):
        if any(ids[i] != token for ids in sequences):
            return i
    return len(shortest)


def to_tree(
    sequences: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], *, gold: int
) -> Question:
    """Return the tree of the distinct sequences without their last tokens, which predict nothing.

    spans[i] = (start, end) are the tokens of sequence i that are scored. A start of 0 means none,
    as nothing predicts a first token.
    """
    distinct = list(dict.fromkeys(map(tuple, sequences)))
    texts = tuple(distinct.index(tuple(ids)) for ids in sequences)
    spans = [spans[texts.index(i)] for i in range(len(distinct))]
    read = [ids[:-1] for ids in distinct]
    fork = shared_length(read)
    rows: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    place = fork
    for ids, (start, end) in zip(distinct, spans, strict=True):
        # Token t is predicted at t - 1: in the trunk before `fork`, else in this text's branch.
        scored = range(start, end) if start else range(0)
        shift = place - fork
        rows += [t - 1 if t - 1 < fork else t - 1 + shift for t in scored]
        targets += ids[start:end] if start else ()
        lengths.append(len(scored))
        place += len(ids) - 1 - fork
    tree = Tree(trunk=read[0][:fork], branches=tuple(ids[fork:] for ids in read), rows=rows)
    return Question(
        tree=tree, targets=tuple(targets), lengths=tuple(lengths), texts=texts, gold=gold
    )
