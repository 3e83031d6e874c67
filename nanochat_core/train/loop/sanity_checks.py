"""Checks of the chat stages, which stop or warn of a run that could only be wasted."""

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

# A model with the loss of guessing knows nothing yet, as one hardly trained, and by chance it may
# be a little worse. One that is worse than that has learnt something else: other ids for the same
# words, or other constants of the arithmetic. A base model of profile `tiny` is at 0.70 of guessing
# with its own tokenizer, at 1.27 and 1.36 with two others of the same words. Special tokens are
# left out: a base model has not met them, and is surer than chance that they do not come.
WORSE_THAN_GUESSING = 1.1
FIRST_STEPS = 10  # of RL, within which one reward should differ from another
# Every kind of message and part that the layout knows.
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
    """Digest of how a conversation becomes tokens and mask, whatever the vocabulary."""
    letters = Tokenizer({bytes([i]): i for i in range(256)})
    rendered = render_conversation(letters, EXAMPLE, max_tokens=1000)
    return hashlib.sha256(repr(rendered).encode()).hexdigest()


def write_chat_facts(directory: Path, tokenizer: Tokenizer) -> None:
    """Say in a chat model's directory what it was taught with."""
    write_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout())


def open_chat_tokenizer(directory: Path, *, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model that is to be trained on.

    Raises ModelError when it is not the one of a model with such a vocabulary, or not the one that
    the model says it was taught with, or, of a chat model, if the layout of conversations is not.
    """
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokenizer.check_model(vocab_size)
    check_lineage(directory, tokenizer=tokenizer.digest(), layout=chat_layout())
    return tokenizer


def check_first_loss(loss: float, *, vocab_size: int) -> None:
    """Raises ModelError when a model is worse than guessing, before its first step.

    `loss`: nats per ordinary token of the assistant in held-out conversations. Of a model that
    guesses evenly it is ln(vocab_size), whatever the text; NaN, of no such token, passes.
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
    """A warning when the mean rewards of a run's first steps, so far, teach nothing; once.

    It comes with the last of the first steps, if every answer in all of them got 0, or 1.
    """
    if len(rewards) != FIRST_STEPS or len(set(rewards)) > 1 or rewards[0] not in (0.0, 1.0):
        return None
    way = "easier" if rewards[0] == 0.0 else "harder"
    return (
        f"warning: every answer of the first {FIRST_STEPS} steps got reward {rewards[0]:g}, so "
        f"there is nothing to learn from; give rl.task {way} questions, or a model that was "
        "trained on its answers"
    )
