"""Makes prompts from conversations and texts, shortened to fit the model's context."""

from collections.abc import Sequence

from nanochat_core.server.api.schema import RequestError
from nanochat_core.server.config import Overflow
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_for_completion

ANSWER_SHARE = 4  # a quarter of the context is reserved for the answer, or max_tokens if fewer


def make_chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[tuple[str, str]],
    *,
    context: int,
    max_tokens: int,
    overflow: Overflow,
) -> list[int]:
    """Return the tokens of a conversation of (role, content) up to where the model answers.

    If they and `max_tokens` are more than `context`, "drop" leaves out the oldest turns, but keeps
    a system message; "refuse" raises RequestError. So does a last message that is too long alone.
    """
    wanted = max_tokens if overflow == "refuse" else min(max_tokens, context // ANSWER_SHARE)
    # Each message is encoded once to choose the turns to leave out. Rendering again after each
    # removal would take quadratic time. + 2: the special tokens around each message.
    lengths = [len(tokenizer.encode(content)) + 2 for _, content in messages]
    total = sum(lengths) + 2
    first = 1 if messages[0][0] == "system" else 0
    kept = list(messages)
    if overflow == "drop":
        gone = first
        # In pairs, a user's message and its answer, so that roles still alternate.
        while total + wanted > context and gone < len(messages) - 1:
            total -= lengths[gone] + lengths[gone + 1]
            gone += 2
        kept = [*messages[:first], *messages[gone:]]
    # The lengths are an estimate; the rendered prompt decides, and rarely needs another pass.
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
    """Return the tokens of the beginning of a document; `text` itself if it is tokens.

    Raises RequestError if there are too many, or tokens that the model does not know.
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
