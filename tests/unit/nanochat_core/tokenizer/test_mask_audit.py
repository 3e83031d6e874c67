"""Which tokens carry loss, audited on a thousand conversations of every task.

A small machine that knows nothing of how conversations are rendered reads the tokens again, one
after the other, and says which of them an assistant writes itself: its text, its calls and the end
of its turn. The masks, and those of the rows that are trained on, must say the same.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from pathlib import Path

import numpy as np
import pytest

from nanochat_core.data.conversations.chat_rows import ChatRows, make_piece, write_rows
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.base import Conversation, text_of
from tasks.kinds.sources import GeneratedTask, HubTask
from tasks.names import TASKS
from tasks.registry import generate, task_named
from tests.support.tasks.rows import ROWS, rows_of

COUNT = 1000
MADE = sorted(name for name in TASKS if isinstance(task_named(name), GeneratedTask))
ALL = [*MADE, *sorted(ROWS)]
ROW_LEN = 129  # so that the longest conversations are cut off

# state -> what each special token does there: (whether an assistant writes it, the next state).
MACHINE = {
    "between": {"<|user_start|>": (0, "asked"), "<|assistant_start|>": (0, "answering")},
    "asked": {"<|user_end|>": (0, "between")},
    "answering": {
        "<|python_start|>": (1, "calling"),
        "<|output_start|>": (0, "told"),
        "<|assistant_end|>": (1, "between"),
    },
    "calling": {"<|python_end|>": (1, "answering")},
    "told": {"<|output_end|>": (0, "answering")},
}
OWN = {"asked": 0, "answering": 1, "calling": 1, "told": 0}  # ordinary tokens; none is between


def test_every_task_is_audited() -> None:
    assert sorted(ALL) == sorted(TASKS)


def conversations_of(name: str) -> Iterator[Conversation]:
    """A thousand: made, of every grade; or of published rows, or of a file, which is repeated."""
    if name in ROWS:
        task = task_named(name)
        assert isinstance(task, HubTask)
        return iter([task.convert(row) for row in rows_of(name, COUNT, seed=11)])
    grades = [generate(name, "train", COUNT // 3 + 1, grade=g, seed=11) for g in (1, 2, 3)]
    return islice(cycle(chain(*grades)), COUNT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Trained on the conversations."""
    messages = (
        m for name in ALL for c in islice(conversations_of(name), 50) for m in c["messages"]
    )
    return Tokenizer.train((text_of(m["content"]) for m in messages), vocab_size=500)


@functools.cache
def special_names(tokenizer: Tokenizer) -> dict[int, str]:
    return {tokenizer.special(name): name for name in SPECIAL_TOKENS}


def written_by_assistant(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """By the machine, 1 for each token that an assistant writes itself, 0 for all others."""
    names = special_names(tokenizer)
    state, found = "", list[int]()
    for token in ids:
        name = names.get(token)
        if name == "<|bos|>":
            own, state = 0, "between"
        elif name is None:
            own = OWN[state]
        else:
            own, state = MACHINE[state][name]
        found.append(own)
    return found


@pytest.mark.parametrize("name", ALL)
def test_the_assistants_own_tokens_carry_loss_and_no_others(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    conversations = list(conversations_of(name))
    assert len(conversations) == COUNT
    learnt = 0
    for conversation in conversations:
        ids, mask = render_conversation(tokenizer, conversation, max_tokens=10**6)
        assert mask == written_by_assistant(tokenizer, ids)
        assert any(mask)
        assert tokenizer.special("<|assistant_end|>") in ids
        learnt += sum(mask)
    assert learnt > COUNT
    rendered = [render_conversation(tokenizer, c, max_tokens=ROW_LEN) for c in conversations]
    write_rows([make_piece(rendered, dtype="uint16")], tmp_path / "rows", row_len=ROW_LEN)
    rows = ChatRows.open(tmp_path / "rows")
    tokens, masks = rows.take(np.arange(len(rows.tokens)))
    for row, mask in zip(tokens.tolist(), masks.tolist(), strict=True):
        assert mask == written_by_assistant(tokenizer, row)
    assert masks.sum() == sum(sum(mask) for _, mask in rendered)


def test_a_wrong_mask_is_noticed(tokenizer: Tokenizer) -> None:
    """The audit's control: each token's bit alone, and the mistakes one could make."""
    [conversation] = islice((c for c in conversations_of("gsm8k") if "python" in str(c)), 1)
    ids, mask = render_conversation(tokenizer, conversation, max_tokens=10**6)
    expected = written_by_assistant(tokenizer, ids)
    assert mask == expected
    for i in range(len(mask)):
        assert [*mask[:i], 1 - mask[i], *mask[i + 1 :]] != expected
    assert [0, *mask[:-1]] != expected  # shifted, as targets are
    for forgotten in ("<|assistant_end|>", "<|python_start|>", "<|python_end|>"):
        assert [
            m * (i != tokenizer.special(forgotten)) for i, m in zip(ids, mask, strict=True)
        ] != (expected)


def test_tokens_in_an_order_that_no_conversation_has_are_noticed(tokenizer: Tokenizer) -> None:
    def ids(*names: str) -> list[int]:
        return [tokenizer.special(f"<|{name}|>") for name in names]

    for wrong in (
        ids("user_start"),  # before the first <|bos|>
        ids("bos", "user_start", "assistant_start"),
        ids("bos", "user_start", "user_end", "python_start"),
        ids("bos", "assistant_start", "python_start", "assistant_end"),
        ids("bos", "assistant_start", "output_end"),
    ):
        with pytest.raises(KeyError):
            written_by_assistant(tokenizer, wrong)
