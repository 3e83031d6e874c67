"""Checks of the chat stages: they stop a run that could only be wasted, or warn of one."""

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nanochat_core.errors import ModelError
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from nanochat_core.train.loop.lineage import check_lineage, write_lineage
from tasks.base import Conversation

# Times the loss of guessing evenly. A hardly trained model is at 1, by chance a little above. One
# far above was trained with other ids for the same words, or other constants of the arithmetic: a
# base model of profile `tiny` is at 0.70 with its own tokenizer, at 1.27 and 1.36 with two others
# of the same words. Special tokens are left out: a base model has not seen them, and gives them
# less than an even share.
WORSE_THAN_GUESSING = 1.1
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


def write_chat_facts(directory: Path, tokenizer: Tokenizer) -> None:
    """Record in a chat model's directory its tokenizer and chat layout."""
    write_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout())


def open_chat_tokenizer(directory: Path, *, vocab_size: int) -> Tokenizer:
    """Open the tokenizer of a model that is to be trained further.

    Raises ModelError if the model has another vocabulary size, if its record names another
    tokenizer, or, of a chat model, another chat layout.
    """
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokenizer.check_model(vocab_size)
    check_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout())
    return tokenizer


def check_first_loss(loss: float, *, vocab_size: int) -> None:
    """Raise ModelError if a model is worse than guessing before its first step.

    `loss`: nats per ordinary token of the assistant in held-out conversations. For a model that
    guesses evenly it is ln(vocab_size), whatever the text. NaN, without such a token, passes.
    """
    guessing = math.log(vocab_size)
    if loss > WORSE_THAN_GUESSING * guessing:
        raise ModelError(
            f"before the first step the loss on held-out conversations is {loss:.2f} nats a token, "
            f"guessing among {vocab_size} tokens gives {guessing:.2f}",
            hint="the weights fit neither this tokenizer nor these numerics: is the tokenizer "
            "another model's, or was the model imported as of another era?",
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
