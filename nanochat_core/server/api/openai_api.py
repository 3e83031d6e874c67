"""OpenAI's routes: POST /v1/chat/completions and /v1/completions, streamed or not; GET /v1/models.

Calculator calls and their results are left out of answers: OpenAI's clients would show them as
text. Requests, limits and defaults are in openai_schema.py.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanochat_core.server.api.chat_api import make_draw
from nanochat_core.server.api.http import (
    PING,
    EventStream,
    event,
    openai_error,
    openai_type,
    read_body,
    refusal,
    while_listening,
)
from nanochat_core.server.api.openai_choices import CHAT, TEXT, Gathered, Shape
from nanochat_core.server.api.openai_schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_ALTERNATIVES,
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    Sampled,
)
from nanochat_core.server.api.prompts import make_chat_prompt, make_text_prompt
from nanochat_core.server.api.schema import DEFAULTS, RequestError, check_turns, parse
from nanochat_core.server.service import (
    GenerationStream,
    Service,
    StreamEvent,
    engine_seed,
    prepared,
)
from nanochat_core.server.workers.ipc import EngineRequest
from nanochat_core.server.workers.pool import Busy, NoEngine, Pool


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The fields that all objects of one response share."""

    id: str
    created: int
    model: str
    shape: Shape

    def object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


async def chat_completions(request: Request) -> Response:
    """Answer POST /v1/chat/completions."""
    service: Service = request.app.state.service
    chat = parse(ChatCompletionRequest, await read_body(request))
    # OpenAI renamed the system role to developer; the model knows one of the two.
    messages = [
        ("system" if message.role == "developer" else message.role, message.content)
        for message in chat.messages
    ]
    check_turns(messages)
    pool = service.pool
    given = chat.max_completion_tokens or chat.max_tokens
    max_tokens = given or int(DEFAULTS["max_tokens"])

    def make_prompt() -> list[int]:
        return make_chat_prompt(
            pool.tokenizer,
            messages,
            context=pool.facts.sequence_len,
            max_tokens=max_tokens,
            overflow=service.rules.overflow,
        )

    pool.find_place(chat.n or 1)
    prompt = await prepared(pool, make_prompt, size=sum(len(content) for _, content in messages))
    wants_log_probs = chat.logprobs or chat.top_logprobs
    log_probs = (chat.top_logprobs or 0) if wants_log_probs else None
    ask = _make_ask(request, chat, prompt, max_tokens, log_probs)
    return await _respond(request, pool, chat, [ask], CHAT)


async def completions(request: Request) -> Response:
    """Answer POST /v1/completions."""
    service: Service = request.app.state.service
    text = parse(CompletionRequest, await read_body(request))
    n = text.n or 1
    if text.best_of not in (None, n):
        raise RequestError(
            400,
            f"best_of is {text.best_of} and n is {n}, they must be equal: all answers are returned",
            param="best_of",
        )
    if n * len(text.prompt) > MAX_CHOICES:
        raise RequestError(
            400,
            f"{len(text.prompt)} prompts with n {n} are {n * len(text.prompt)} choices, "
            f"at most {MAX_CHOICES} are written",
            param="n",
        )
    pool = service.pool
    max_tokens = text.max_tokens or DEFAULT_COMPLETION_TOKENS

    def make_prompts() -> list[list[int]]:
        return [
            make_text_prompt(
                pool.tokenizer,
                prompt,
                context=pool.facts.sequence_len,
                max_tokens=max_tokens,
                overflow=service.rules.overflow,
            )
            for prompt in text.prompt
        ]

    pool.find_place(n)
    prompts = await prepared(pool, make_prompts, size=sum(map(len, text.prompt)))
    asks = [_make_ask(request, text, prompt, max_tokens, text.logprobs) for prompt in prompts]
    return await _respond(request, pool, text, asks, TEXT)


async def models(request: Request) -> Response:
    """Answer GET /v1/models: the one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(request.app.state.service)]})


async def model(request: Request) -> Response:
    """Answer GET /v1/models/{name}."""
    service: Service = request.app.state.service
    if request.path_params["name"] != service.name:
        return refusal("/v1", 404, f"the model here is {service.name}", param="model")
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "nanochat",
    }


def _make_ask(
    request: Request, form: Sampled, prompt: list[int], max_tokens: int, log_probs: int | None
) -> EngineRequest:
    alternatives = (form.n or 1) * max_tokens * (log_probs or 0)
    if alternatives > MAX_ALTERNATIVES:
        raise RequestError(
            400,
            f"{log_probs} alternatives to each of {max_tokens} tokens of {form.n or 1} choices are "
            f"{alternatives}, at most {MAX_ALTERNATIVES} are returned",
            param="logprobs" if isinstance(form, CompletionRequest) else "top_logprobs",
        )
    return EngineRequest(
        prompt=prompt,
        num_samples=form.n or 1,
        max_tokens=max_tokens,
        draw=make_draw(form.temperature, form.top_k, form.top_p),
        seed=engine_seed(form.seed),
        cache_salt=request.state.cache_salt,
        num_log_probs=log_probs,
    )


async def _respond(
    request: Request, pool: Pool, form: Sampled, asks: Sequence[EngineRequest], shape: Shape
) -> Response:
    """Return all choices of all prompts, streamed or at once."""
    service: Service = request.app.state.service
    answerings = list[GenerationStream]()

    def close() -> None:
        for answering in answerings:
            answering.close()

    try:
        for ask in asks:
            answerings.append(GenerationStream(service, pool, ask, stops=form.stop or ()))
    except (Busy, NoEngine):
        close()  # the prompts that were submitted before the refused one
        raise
    # For the access log, which shows the tokens of one prompt.
    request.state.answering = answerings[0]
    head = _Head(
        id=f"{shape.prefix}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=service.name,
        shape=shape,
    )
    if form.stream:
        wants_usage = bool(form.stream_options and form.stream_options.include_usage)
        chunks = _stream(head, answerings, pool, wants_usage=wants_usage, n=form.n or 1)
        return EventStream(chunks, on_end=close)
    try:
        gathering = _gather(head, answerings, pool, n=form.n or 1)
        return await while_listening(request, gathering, on_gone=close)
    finally:
        close()


async def _gather(
    head: _Head, answerings: Sequence[GenerationStream], pool: Pool, *, n: int
) -> JSONResponse:
    choices = [Gathered(index=i, pool=pool) for i in range(n * len(answerings))]
    async with contextlib.aclosing(_merged(answerings)) as merged:
        async for number, items in merged:
            for item in items:
                if item.finish == "failed":
                    return refusal("/v1", answerings[number].failure_status, item.error)
                choices[n * number + item.sample].add(item)
    whole = [head.shape.whole(choice) for choice in choices]
    return JSONResponse(head.object(head.shape.kind, whole, usage=_usage(answerings)))


async def _stream(
    head: _Head, answerings: Sequence[GenerationStream], pool: Pool, *, wants_usage: bool, n: int
) -> AsyncIterator[str]:
    more: dict[str, Any] = {"usage": None} if wants_usage else {}
    kind = head.shape.chunk_kind

    def say(choices: list[dict[str, Any]], **extra: Any) -> str:
        return event(head.object(kind, choices, **{**more, **extra}))

    # At once: the client sees that its request was accepted, even if it waits for a slot.
    yield "".join(
        say([choice]) for i in range(n * len(answerings)) for choice in head.shape.opening(i)
    )
    async with contextlib.aclosing(_merged(answerings)) as merged:
        async for number, items in merged:
            chunk = ""
            for item in items:
                # The status has been sent: an error can only be an event of the stream.
                if item.finish == "failed":
                    kind_of_error = openai_type(answerings[number].failure_status)
                    yield chunk + event(openai_error(item.error, kind_of_error))
                    yield "data: [DONE]\n\n"
                    return
                for choice in head.shape.part(n * number + item.sample, item, pool):
                    chunk += say([choice])
            # No items: a sign of life. Items without a chunk: calculator calls, left out.
            if chunk or not items:
                yield chunk or PING
    if wants_usage:
        yield say([], usage=_usage(answerings))
    yield "data: [DONE]\n\n"


async def _merged(
    answerings: Sequence[GenerationStream],
) -> AsyncGenerator[tuple[int, list[StreamEvent]]]:
    """Yield (index, events) of all streams as they come.

    All are read at the same time, so that each is cancelled as soon as its stop string is found.
    """
    streams = [answering.tell() for answering in answerings]

    def next_of(number: int) -> asyncio.Future[list[StreamEvent] | None]:
        return asyncio.ensure_future(anext(streams[number], None))

    waiting = {next_of(number): number for number in range(len(streams))}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number, items = waiting.pop(future), future.result()
                if items is not None:  # else that stream has ended
                    waiting[next_of(number)] = number
                    yield number, items
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _usage(answerings: Sequence[GenerationStream]) -> dict[str, int]:
    prompt = sum(answering.prompt_tokens for answering in answerings)
    completion = sum(answering.completion_tokens for answering in answerings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
