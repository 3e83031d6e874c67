"""Conversations of every task as tokens: nothing is lost, repeated, or learnt that the assistant
did not write."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.base import PART_TYPES, text_of
from tasks.names import TASKS
from tasks.registry import generate, task_named
from tests.support.tasks.rows import ROWS, rows_of


def example_of(name, seed):
    """One conversation of a task."""
    if name in ROWS:
        [row] = rows_of(name, 1, seed=seed)
        return task_named(name).convert(row)
    return next(generate(name, "train", 1, grade=1 + seed % 3, seed=seed))


def words():
    for name in TASKS:
        for seed in range(20):
            for message in example_of(name, seed)["messages"]:
                yield text_of(message["content"])


TOKENIZER = Tokenizer.train(words(), vocab_size=420)
BOS, USER, USER_END, ASSISTANT, ASSISTANT_END, PYTHON, PYTHON_END, OUTPUT, OUTPUT_END = (
    TOKENIZER.special(name) for name in SPECIAL_TOKENS
)

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


def reread(ids):
    """(region, text) pieces and the expected mask, read off the token stream by its wrappers.

    An automaton of its own: it knows the nine special tokens and nothing of the renderer.
    """
    starts = {USER: USER_END, ASSISTANT: ASSISTANT_END, PYTHON: PYTHON_END, OUTPUT: OUTPUT_END}
    names = {USER: "user", ASSISTANT: "assistant", PYTHON: "python", OUTPUT: "output"}
    assert ids[0] == BOS
    open_regions, pieces, mask = [], [], [0]
    for token in ids[1:]:
        assert token != BOS
        if token in starts:
            assert (names[token] in ("python", "output")) == bool(open_regions)
            mask.append(int(token == PYTHON))
            open_regions.append(token)
            pieces.append((names[token], []))
            continue
        region = open_regions[-1]
        mask.append(int(region in (ASSISTANT, PYTHON)))
        if token == starts[region]:
            open_regions.pop()
            if open_regions:
                pieces.append(("assistant", []))
        else:
            assert token < BOS
            pieces[-1][1].append(token)
    assert not open_regions
    return [(name, TOKENIZER.decode(held)) for name, held in pieces], mask


def pieces_of(conversation):
    """What `reread` should find, from the conversation."""
    system = ""
    for message in conversation["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            system = f"{content}\n\n"
            continue
        if isinstance(content, str):
            yield role, system + content
            system = ""
            continue
        text = ""
        for item in content:
            if item["type"] == "text":
                text += item["text"]
                continue
            yield "assistant", text
            yield {"python": "python", "python_output": "output"}[item["type"]], item["text"]
            text = ""
        yield "assistant", text


def check(conversation):
    ids, mask = render_conversation(TOKENIZER, conversation, max_tokens=10**6)
    pieces, expected = reread(ids)
    assert pieces == list(pieces_of(conversation))
    assert mask == expected


@pytest.mark.parametrize("name", sorted(TASKS))
@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_the_mask_covers_what_the_assistant_writes_and_nothing_else(name, seed):
    check(example_of(name, seed))


@settings(deadline=None, max_examples=200)
@given(talks())
def test_it_does_so_in_a_persons_own_conversations(conversation):
    check(conversation)
