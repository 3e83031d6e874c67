"""Checks of the training stages: they stop a run that could only be wasted, or warn of one."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from nanochat_core.errors import ModelError
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from nanochat_core.train.loop.fixed_text import fixed_text_loss
from nanochat_core.train.loop.lineage import check_lineage, write_lineage
from tasks.base import Conversation

# Of a loss recorded by another machine, kernel or batch size. Another tokenizer of the same words
# changes that of the models of profile `tiny` by 9 to 30 %, in either direction.
SAME_LOSS = 0.05
FIRST_STEPS = 10  # of RL, within which one reward should differ from another
# Has every kind of message and part of the layout, so that a change of any changes the digest.
EXAMPLE: Conversation = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "python", "text": "1+1"},
                {"type": "python_output", "text": "2"},
            ],
        },
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "w"},
    ]
}


@cache
def chat_layout() -> str:
    """Return a digest of how a conversation becomes tokens and mask, whatever the vocabulary."""
    # One token a byte: no merges of a vocabulary that could differ.
    letters = Tokenizer({bytes([i]): i for i in range(256)})
    rendered = render_conversation(letters, EXAMPLE, max_tokens=1000)
    return hashlib.sha256(repr(rendered).encode()).hexdigest()


def write_chat_facts(directory: Path, tokenizer: Tokenizer, model: GPT) -> None:
    """Record in a chat model's directory its tokenizer, chat layout and loss on a fixed text."""
    loss = fixed_text_loss(model, tokenizer)
    write_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout(), loss=loss)


def open_chat_tokenizer(directory: Path, model: GPT) -> Tokenizer:
    """Open the tokenizer of the model in `directory`, which `model` is, to train it further.

    Raises ModelError if the model has another vocabulary size, or if its record names another
    tokenizer or, of a chat model, another chat layout.
    """
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokenizer.check_model(model.config.vocab_size)
    check_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout())
    return tokenizer


def check_fit(
    directory: Path, model: GPT, tokenizer: Tokenizer, *, log: Callable[[str], None]
) -> None:
    """Raise ModelError if a model's loss on a fixed text is not the recorded one.

    Then its weights fit neither the tokenizer nor the constants of arithmetic. Call it before the
    first step: `model` has the weights in `directory`. Without a record of that text only the log
    gets a line. No other loss can replace the record: a healthy model of another language is worse
    than guessing on any text of ours, and most wrong constants leave a model better than that.
    """
    recorded = check_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout())
    if recorded is None:
        log(
            "warning: no stage recorded the loss of these weights on this version's fixed text: "
            "whether they fit the tokenizer and the numerics is not checked"
        )
        return
    loss = fixed_text_loss(model, tokenizer)
    if not abs(loss - recorded) <= SAME_LOSS * recorded:
        raise ModelError(
            f"before the first step the loss on a fixed text is {loss:.2f} nats a token, "
            f"the stage that made the model measured {recorded:.2f}",
            hint="the weights fit neither this tokenizer nor these numerics: is the tokenizer "
            "another model's, or was the config edited?",
        )


def warn_of_rewards(rewards: Sequence[float]) -> str | None:
    """Return a warning if every answer of the first steps got reward 0, or every answer 1.

    `rewards`: the mean of each step so far. None but at the last of the first steps, so that it
    appears once.
    """
    # A mean of exactly 0 or 1 in every step is one reward for all: each advantage is 0.
    if len(rewards) != FIRST_STEPS or len(set(rewards)) > 1 or rewards[0] not in (0.0, 1.0):
        return None
    way = "easier" if rewards[0] == 0.0 else "harder"
    return (
        f"warning: every answer of the first {FIRST_STEPS} steps got reward {rewards[0]:g}, so "
        f"there is nothing to learn from; give rl.task {way} questions, or a model that was "
        "trained on its answers"
    )
