"""Conversations of every kind of task, as tokens and in rows: nothing is lost, said twice, or
learnt that the assistant did not write."""

import itertools
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanochat_core.data.conversations.chat_rows import ChatRows, make_piece, write_rows
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.base import PART_TYPES, text_of
from tasks.kinds.sources import GeneratedTask
from tasks.names import TASKS
from tasks.registry import generate, task_named
from tests.support.tasks.rows import ROWS, rows_of

MADE = sorted(name for name in TASKS if isinstance(task_named(name), GeneratedTask))
PUBLISHED = sorted(ROWS)
SEEDS = st.integers(0, 2**32)


def example_of(name, seed):
    """One conversation of a task."""
    if name in ROWS:
        [row] = rows_of(name, 1, seed=seed)
        return task_named(name).convert(row)
    return next(generate(name, "train", 1, grade=1 + seed % 3, seed=seed))


def words():
    for name in (*MADE, *PUBLISHED):
        for seed in range(20):
            for message in example_of(name, seed)["messages"]:
                yield text_of(message["content"])


TOKENIZER = Tokenizer.train(words(), vocab_size=420)
IDS = {name: TOKENIZER.special(name) for name in SPECIAL_TOKENS}
MARKS = set(IDS.values())

anything = st.text(max_size=12) | st.sampled_from(SPECIAL_TOKENS)
parts = st.lists(
    st.builds(
        lambda kind, text: {"type": kind, "text": text}, st.sampled_from(PART_TYPES), anything
    )
)


@st.composite
def talks(draw):
    """A conversation as a person's own file may have it."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(anything)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(anything)})
        messages.append({"role": "assistant", "content": draw(anything | parts)})
    return {"messages": messages[: len(messages) - draw(st.integers(0, 1))]}


def said(conversation):
    """What the assistant wrote, what others wrote, and how often each special token is due to each.

    From the conversation alone: no word here of the order in which tokens stand.
    """
    own, others = [], []
    marks = Counter({("<|bos|>", 0): 1})
    system = ""
    for message in conversation["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            system = f"{content}\n\n"
            continue
        is_own = role == "assistant"
        marks[f"<|{role}_start|>", 0] += 1
        marks[f"<|{role}_end|>", int(is_own)] += 1
        if not is_own:
            others.append(system + content)
            system = ""
            continue
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = {"python": "python", "python_output": "output"}.get(part["type"])
            is_own = kind != "output"
            (own if is_own else others).append(part["text"])
            if kind:
                marks[f"<|{kind}_start|>", int(is_own)] += 1
                marks[f"<|{kind}_end|>", int(is_own)] += 1
    return "".join(own), "".join(others), marks


def check(conversation):
    ids, mask = render_conversation(TOKENIZER, conversation, max_tokens=10**6)
    assert len(ids) == len(mask)
    assert set(mask) <= {0, 1}
    pairs = list(zip(ids, mask, strict=True))
    texts = [
        TOKENIZER.decode_bytes([i for i, m in pairs if m == who and i not in MARKS])
        for who in (1, 0)
    ]
    own, others, marks = said(conversation)
    assert [text.decode() for text in texts] == [own, others]
    names = {number: name for name, number in IDS.items()}
    assert Counter((names[i], m) for i, m in pairs if i in MARKS) == marks


@pytest.mark.parametrize("name", [*MADE, *PUBLISHED])
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS)
def test_the_mask_covers_what_the_assistant_writes_and_nothing_else(name, seed):
    check(example_of(name, seed))


@settings(deadline=None, max_examples=200)
@given(talks())
def test_it_does_so_in_a_persons_own_conversations(conversation):
    check(conversation)


def pieces(tokens, mask):
    """The conversations in a row, each from its <|bos|> to the next one."""
    starts = [*np.flatnonzero(tokens == IDS["<|bos|>"]), len(tokens)]
    return [
        (tuple(tokens[a:b].tolist()), tuple(mask[a:b].tolist()))
        for a, b in itertools.pairwise(starts)
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(example_of, st.sampled_from([*MADE, *PUBLISHED]), SEEDS) | talks(), max_size=30
    ),
    st.integers(40, 400),
)
def test_rows_hold_every_token_once(conversations, row_len):
    rendered = [render_conversation(TOKENIZER, c, max_tokens=row_len) for c in conversations]
    assume(any(any(mask) for _, mask in rendered))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "rows"
        write_rows([make_piece(rendered, dtype="uint16")], directory, row_len=row_len)
        rows = ChatRows.open(directory)
        tokens, mask = rows.take(np.arange(len(rows.tokens)))
    found = Counter(piece for row in zip(tokens, mask, strict=True) for piece in pieces(*row))
    padding = ((IDS["<|bos|>"],), (0,))
    del found[padding]
    assert found == Counter((tuple(ids), tuple(mask)) for ids, mask in rendered)
    assert mask.sum() == sum(sum(mask) for _, mask in rendered)
    assert all(row[0] == IDS["<|bos|>"] for row in tokens)
