"""Checks of the chat stages, which stop or warn of a run that could only be wasted.

A model directory that a chat stage made has, beside the weights, what they were taught with:

    chat.json    {format, tokenizer, layout}   digests of the tokenizer and of the chat layout
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from nanochat_core.errors import ModelError
from nanochat_core.job import write_json
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.base import Conversation

FORMAT = 1
FILE = "chat.json"
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
    """Say in a model directory what its model is taught with."""
    facts = {"format": FORMAT, "tokenizer": tokenizer.digest(), "layout": chat_layout()}
    write_json(directory / FILE, facts)


def open_chat_tokenizer(directory: Path, *, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model that is to be trained on.

    Raises ModelError when it is not the one of a model with such a vocabulary, or, of a chat model,
    not the one that it was taught with.
    """
    tokenizer = Tokenizer.load(directory / "tokenizer")
    tokenizer.check_model(vocab_size)
    check_chat_facts(directory, tokenizer)
    return tokenizer


def check_chat_facts(directory: Path, tokenizer: Tokenizer) -> None:
    """Raises ModelError when a model was taught with another tokenizer or another chat layout.

    A base model says nothing of either, nor does one from elsewhere: nothing is checked.
    """
    path = directory / FILE
    if not path.exists():
        return
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        told = facts["tokenizer"], facts["layout"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}", hint="fetch the model again: `nanochat fetch --help`"
        ) from error
    actual = tokenizer.digest(), chat_layout()
    for what, taught, ours in zip(("tokenizer", "chat layout"), told, actual, strict=True):
        if taught != ours:
            raise ModelError(
                f"the model in {directory} was taught with {what} {taught[:12]}, "
                f"this is {ours[:12]}",
                hint="train on with the tokenizer and the version it was made with, or make the "
                "model again: `nanochat run --force midtrain`",
            )


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
