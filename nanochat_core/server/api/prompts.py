"""Conversations and texts as prompts that fit the model's context."""

from collections.abc import Sequence

from nanochat_core.server.api.schema import RequestError
from nanochat_core.server.config import Overflow
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_for_completion

ANSWER_SHARE = 4  # a quarter of the context is kept for the answer, if it may be that long


def make_chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[tuple[str, str]],
    *,
    context: int,
    max_tokens: int,
    overflow: Overflow,
) -> list[int]:
    """The tokens of a conversation of (role, content) up to where the model answers.

    When they and `max_tokens` are more than `context`, "drop" leaves out the oldest turns, but
    keeps a system message; "refuse" refuses. Raises RequestError where one message alone is too
    long.
    """
    wanted = max_tokens if overflow == "refuse" else min(max_tokens, context // ANSWER_SHARE)
    # Each message is encoded once to know which turns to leave out, whatever their number.
    lengths = [len(tokenizer.encode(content)) + 2 for _, content in messages]
    total = sum(lengths) + 2
    first = 1 if messages[0][0] == "system" else 0
    kept = list(messages)
    if overflow == "drop":
        gone = first
        while total + wanted > context and gone < len(messages) - 1:
            total -= lengths[gone] + lengths[gone + 1]
            gone += 2
        kept = [*messages[:first], *messages[gone:]]
    while True:
        prompt = _render(tokenizer, kept)
        if len(prompt) + wanted <= context or overflow == "refuse" or len(kept) == first + 1:
            break
        del kept[first : first + 2]
    if overflow == "refuse" and len(prompt) + wanted > context:
        raise RequestError(
            400,
            f"the conversation is {len(prompt)} tokens and max_tokens is {wanted}: together "
            f"{len(prompt) + wanted}, the model's context is {context}",
            param="messages",
        )
    return _check_room(prompt, context, "the last message", param="messages")


def make_text_prompt(
    tokenizer: Tokenizer,
    text: str | Sequence[int],
    *,
    context: int,
    max_tokens: int,
    overflow: Overflow,
) -> list[int]:
    """The tokens of the beginning of a document, which are `text` itself where that is tokens.

    Raises RequestError when there are too many, or tokens that the model does not know.
    """
    if isinstance(text, str):
        prompt = [tokenizer.bos, *tokenizer.encode(text)]
    else:
        prompt = list(text)
        strange = [token for token in prompt if not 0 <= token < tokenizer.vocab_size]
        if strange:
            raise RequestError(
                400,
                f"the prompt has {len(strange)} tokens that the model does not know: its tokens "
                f"are 0 to {tokenizer.vocab_size - 1}",
                param="prompt",
            )
    if overflow == "refuse" and len(prompt) + max_tokens > context:
        raise RequestError(
            400,
            f"the prompt is {len(prompt)} tokens and max_tokens is {max_tokens}: together "
            f"{len(prompt) + max_tokens}, the model's context is {context}",
            param="prompt",
        )
    return _check_room(prompt, context, "the prompt", param="prompt")


def _render(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> list[int]:
    turns = [{"role": role, "content": content} for role, content in messages]
    return render_for_completion(tokenizer, {"messages": turns})


def _check_room(prompt: list[int], context: int, what: str, *, param: str) -> list[int]:
    if len(prompt) >= context:
        raise RequestError(
            400,
            f"{what} is too long: {len(prompt)} tokens, the model reads {context - 1}",
            param=param,
        )
    return prompt
