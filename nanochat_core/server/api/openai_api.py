"""OpenAI's routes: POST /v1/chat/completions and /v1/completions, streamed or not; GET /v1/models.

Calculator calls and their results are left out of answers: OpenAI's clients would show them as
text. So is the marker of a chat answer's final number, see `MarkerFilter`. Requests, limits and
defaults are in openai_schema.py.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanochat_core.server.api.chat_api import sampling_params
from nanochat_core.server.api.http import (
    PING,
    EventStream,
    event,
    openai_error,
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
    SampledForm,
)
from nanochat_core.server.api.prompts import make_text_prompt, prepare, prepare_chat_prompt
from nanochat_core.server.api.schema import DEFAULTS, RequestError
from nanochat_core.server.service import GenerationStream, Service, StreamEvent, engine_seed
from nanochat_core.server.workers.ipc import EngineRequest
from nanochat_core.server.workers.pool import Pool, ServiceUnavailable
from nanochat_core.tokenizer.bpe import Tokenizer


async def chat_completions(request: Request, form: ChatCompletionRequest) -> Response:
    """Answer POST /v1/chat/completions."""
    service: Service = request.app.state.service
    # OpenAI renamed the system role to developer; the model knows one of the two.
    messages = [
        ("system" if message.role == "developer" else message.role, message.content)
        for message in form.messages
    ]
    max_tokens = form.max_completion_tokens or form.max_tokens or int(DEFAULTS["max_tokens"])
    pool, prompt = await prepare_chat_prompt(
        service, messages, max_tokens=max_tokens, num_samples=form.n or 1
    )
    wants_log_probs = form.logprobs or form.top_logprobs
    log_probs = (form.top_logprobs or 0) if wants_log_probs else None
    wanted = _engine_request(request, form, prompt, max_tokens, log_probs)
    return await _respond(request, pool, form, [wanted], CHAT)


async def completions(request: Request, form: CompletionRequest) -> Response:
    """Answer POST /v1/completions."""
    service: Service = request.app.state.service
    n = form.n or 1
    if form.best_of not in (None, n):
        raise RequestError(
            400,
            f"best_of is {form.best_of} and n is {n}, they must be equal: all answers are returned",
            param="best_of",
        )
    if n * len(form.prompt) > MAX_CHOICES:
        raise RequestError(
            400,
            f"{len(form.prompt)} prompts with n {n} are {n * len(form.prompt)} choices, "
            f"at most {MAX_CHOICES} are written",
            param="n",
        )
    pool = service.pool
    max_tokens = form.max_tokens or DEFAULT_COMPLETION_TOKENS

    def make() -> list[list[int]]:
        return [
            make_text_prompt(
                pool.tokenizer,
                prompt,
                context=pool.facts.sequence_len,
                max_tokens=max_tokens,
                overflow=service.rules.overflow,
            )
            for prompt in form.prompt
        ]

    prompts = await prepare(pool, make, size=sum(map(len, form.prompt)), num_samples=n)
    wanted = [_engine_request(request, form, p, max_tokens, form.logprobs) for p in prompts]
    return await _respond(request, pool, form, wanted, TEXT)


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


def _engine_request(
    request: Request, form: SampledForm, prompt: list[int], max_tokens: int, log_probs: int | None
) -> EngineRequest:
    n = form.n or 1
    alternatives = n * max_tokens * (log_probs or 0)
    if alternatives > MAX_ALTERNATIVES:
        raise RequestError(
            400,
            f"{log_probs} alternatives to each of {max_tokens} tokens of {n} choices are "
            f"{alternatives}, at most {MAX_ALTERNATIVES} are returned",
            param="logprobs" if isinstance(form, CompletionRequest) else "top_logprobs",
        )
    return EngineRequest(
        prompt=prompt,
        num_samples=n,
        max_tokens=max_tokens,
        params=sampling_params(form.temperature, form.top_k, form.top_p),
        seed=engine_seed(form.seed),
        cache_salt=request.state.cache_salt,
        num_log_probs=log_probs,
    )


async def _respond(
    request: Request, pool: Pool, form: SampledForm, wanted: Sequence[EngineRequest], shape: Shape
) -> Response:
    """Return all choices of all prompts, streamed or at once."""
    service: Service = request.app.state.service
    generations = list[GenerationStream]()

    def close() -> None:
        for generation in generations:
            generation.close()

    try:
        for one in wanted:
            generations.append(GenerationStream(service, pool, one, stops=form.stop or ()))
    except ServiceUnavailable:
        close()  # the prompts that were submitted before the refused one
        raise
    # For the access log, which shows the tokens of one prompt.
    request.state.generation = generations[0]
    head = {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "object": shape.chunk_kind if form.stream else shape.kind,
        "created": int(time.time()),
        "model": service.name,
    }
    tokenizer, n = pool.tokenizer, form.n or 1
    if form.stream:
        wants_usage = bool(form.stream_options and form.stream_options.include_usage)
        chunks = _stream(head, shape, generations, tokenizer, wants_usage=wants_usage, n=n)
        return EventStream(chunks, on_end=close)
    try:
        gathering = _gather(head, shape, generations, tokenizer, n=n)
        return await while_listening(request, gathering, on_gone=close)
    finally:
        close()


async def _gather(
    head: dict[str, Any],
    shape: Shape,
    generations: Sequence[GenerationStream],
    tokenizer: Tokenizer,
    *,
    n: int,
) -> JSONResponse:
    choices = [Gathered() for _ in range(n * len(generations))]
    async with contextlib.aclosing(_merged(generations)) as merged:
        async for number, items in merged:
            for item in items:
                if item.finish == "failed":
                    return refusal("/v1", generations[number].failure_status, item.error)
                shape.add(choices[n * number + item.sample], item)
    whole = [shape.gather(i, choice, tokenizer) for i, choice in enumerate(choices)]
    return JSONResponse({**head, "choices": whole, "usage": _usage(generations)})


async def _stream(
    head: dict[str, Any],
    shape: Shape,
    generations: Sequence[GenerationStream],
    tokenizer: Tokenizer,
    *,
    wants_usage: bool,
    n: int,
) -> AsyncIterator[str]:
    usage: dict[str, Any] = {"usage": None} if wants_usage else {}

    def chunk_of(choices: list[dict[str, Any]]) -> str:
        return "".join(event({**head, "choices": [choice], **usage}) for choice in choices)

    # At once: the client sees that its request was accepted, even if it waits for a slot.
    yield "".join(chunk_of(shape.open(i)) for i in range(n * len(generations)))
    async with contextlib.aclosing(_merged(generations)) as merged:
        async for number, items in merged:
            chunk = ""
            for item in items:
                # The status has been sent: an error can only be an event of the stream.
                if item.finish == "failed":
                    error = openai_error(item.error, generations[number].failure_status)
                    yield chunk + event(error)
                    yield "data: [DONE]\n\n"
                    return
                chunk += chunk_of(shape.stream(n * number + item.sample, item, tokenizer))
            # No items: a sign of life. Items without a chunk: calculator calls, left out.
            if chunk or not items:
                yield chunk or PING
    if wants_usage:
        yield event({**head, "choices": [], "usage": _usage(generations)})
    yield "data: [DONE]\n\n"


async def _merged(
    generations: Sequence[GenerationStream],
) -> AsyncGenerator[tuple[int, list[StreamEvent]]]:
    """Yield (index, events) of all streams as they come.

    All are read at the same time, so that each is cancelled as soon as its stop string is found.
    """
    streams = [generation.events() for generation in generations]

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


def _usage(generations: Sequence[GenerationStream]) -> dict[str, int]:
    prompt = sum(generation.prompt_tokens for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
