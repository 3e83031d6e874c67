"""Makes prompts from conversations and texts, shortened to fit the model's context."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from nanochat_core.server.api.schema import RequestError, check_turns
from nanochat_core.server.config import Overflow
from nanochat_core.server.service import Service
from nanochat_core.server.workers.pool import Pool
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_for_completion
from tasks.base import Part, parts_of

ANSWER_SHARE = 4  # a quarter of the context is reserved for the answer, or max_tokens if fewer
SHORT = 2000  # characters; to tokenise fewer costs less than a thread

_T = TypeVar("_T")


async def prepare_chat_prompt(
    service: Service, messages: Sequence[tuple[str, str]], *, max_tokens: int, num_samples: int = 1
) -> tuple[Pool, list[int]]:
    """Return the prompt of a conversation of (role, content), and the pool that is to answer it.

    `<<12+30=42>>` in an assistant's message is a calculator call and its result.
    Raises RequestError, or ServiceUnavailable if no engine process takes `num_samples` more.
    """
    check_turns(messages)
    pool = service.pool

    def make() -> list[int]:
        return make_chat_prompt(
            pool.tokenizer,
            messages,
            context=pool.facts.sequence_len,
            max_tokens=max_tokens,
            overflow=service.rules.overflow,
        )

    size = sum(len(content) for _, content in messages)
    return pool, await prepare(pool, make, size=size, num_samples=num_samples)


async def prepare(pool: Pool, work: Callable[[], _T], *, size: int, num_samples: int) -> _T:
    """Return `work()`, run in another thread if `size` characters would block the event loop.

    `pool`, whose tokenizer it uses, is not stopped meanwhile. Raises ServiceUnavailable, before
    `work` is run, if no engine process takes `num_samples` more.
    """
    pool.find_worker(num_samples)
    if size <= SHORT:
        return work()
    pool.preparing += 1
    try:
        return await asyncio.to_thread(work)
    finally:
        pool.preparing -= 1


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
    turns = [
        {"role": role, "content": parts_of(content) if role == "assistant" else content}
        for role, content in messages
    ]
    # Each message is encoded once to choose the turns to leave out. Rendering again after each
    # removal would take quadratic time.
    lengths = [_count_tokens(tokenizer, turn["content"]) for turn in turns]
    total = sum(lengths) + 2
    first = 1 if messages[0][0] == "system" else 0
    kept = turns
    if overflow == "drop":
        gone = first
        # In pairs, a user's message and its answer, so that roles still alternate.
        while total + wanted > context and gone < len(messages) - 1:
            total -= lengths[gone] + lengths[gone + 1]
            gone += 2
        kept = [*turns[:first], *turns[gone:]]
    # The lengths are an estimate; the rendered prompt decides, and rarely needs another pass.
    while True:
        prompt = render_for_completion(tokenizer, {"messages": kept})
        if len(prompt) + wanted <= context or overflow == "refuse" or len(kept) == first + 1:
            break
        del kept[first : first + 2]
    if overflow == "refuse":
        _check_total(prompt, wanted, context, "the conversation", param="messages")
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
    if overflow == "refuse":
        _check_total(prompt, max_tokens, context, "the prompt", param="prompt")
    return _check_room(prompt, context, "the prompt", param="prompt")


def _count_tokens(tokenizer: Tokenizer, content: str | Sequence[Part]) -> int:
    """Return the tokens of a message, special ones included: two around it and each call part."""
    if isinstance(content, str):
        return len(tokenizer.encode(content)) + 2
    return 2 + sum(
        len(tokenizer.encode(part["text"])) + (0 if part["type"] == "text" else 2)
        for part in content
    )


def _check_total(prompt: list[int], wanted: int, context: int, what: str, *, param: str) -> None:
    total = len(prompt) + wanted
    if total > context:
        raise RequestError(
            400,
            f"{what} is {len(prompt)} tokens and max_tokens is {wanted}: together {total}, "
            f"the model's context is {context}",
            param=param,
        )


def _check_room(prompt: list[int], context: int, what: str, *, param: str) -> list[int]:
    if len(prompt) >= context:
        raise RequestError(
            400,
            f"{what} is too long: {len(prompt)} tokens, the model reads {context - 1}",
            param=param,
        )
    return prompt
