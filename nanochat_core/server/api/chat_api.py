"""nanochat's own route, POST /chat/completions: a conversation in, server-sent events out.

data: {"token": "...", "gpu": 0}           text, as it is written
data: {"tool_call": "12*3"}                the model asks the calculator
data: {"tool_result": "36"}                the calculator's result
data: {"usage": {"prompt_tokens", "completion_tokens", "seconds", "finish_reason"}}
data: {"error": "..."}                     instead of the usage: the answer failed
data: {"done": true}                       always the last
"""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from nanochat_core.engine.requests import SamplingParams
from nanochat_core.server.api.http import PING, EventStream, event, read_body
from nanochat_core.server.api.prompts import make_chat_prompt
from nanochat_core.server.api.schema import DEFAULTS, ChatRequest, check_turns, parse
from nanochat_core.server.service import GenerationStream, Service, engine_seed, prepared
from nanochat_core.server.workers.ipc import EngineRequest


async def chat_completions(request: Request) -> Response:
    """Stream the answer to a conversation."""
    service: Service = request.app.state.service
    chat = parse(ChatRequest, await read_body(request))
    messages = [(message.role, message.content) for message in chat.messages]
    check_turns(messages)
    pool = service.pool
    max_tokens = DEFAULTS["max_tokens"] if chat.max_tokens is None else chat.max_tokens

    def make_prompt() -> list[int]:
        return make_chat_prompt(
            pool.tokenizer,
            messages,
            context=pool.facts.sequence_len,
            max_tokens=int(max_tokens),
            overflow=service.rules.overflow,
        )

    # Refuse before the prompt is tokenised if the queue is full.
    pool.find_place(1)
    prompt = await prepared(pool, make_prompt, size=sum(len(content) for _, content in messages))
    ask = EngineRequest(
        prompt=prompt,
        num_samples=1,
        max_tokens=int(max_tokens),
        draw=make_draw(chat.temperature, chat.top_k),
        seed=engine_seed(chat.seed),
        cache_salt=request.state.cache_salt,
    )
    answering = GenerationStream(service, pool, ask)
    request.state.answering = answering
    return EventStream(_events(answering), on_end=answering.close)


LEAST = 1e-6  # of temperature and top_p: float32, in which the engine draws, makes less a 0


def make_draw(
    temperature: float | None, top_k: int | None, top_p: float | None = None
) -> SamplingParams:
    """Return sampling parameters, with this server's defaults for those that are None."""
    temperature = DEFAULTS["temperature"] if temperature is None else temperature
    top_k = int(DEFAULTS["top_k"]) if top_k is None else top_k
    top_p = 1.0 if top_p is None else top_p
    if temperature < LEAST or top_p < LEAST:
        return SamplingParams(temperature=0.0)
    return SamplingParams(temperature=temperature, top_k=top_k or None, top_p=top_p)


async def _events(answering: GenerationStream) -> AsyncIterator[str]:
    async for items in answering.tell():
        # One chunk for all that came together: one write, not one per token.
        chunk = ""
        for item in items:
            if item.piece is None:
                chunk += _end(answering, item.error)
            elif item.piece.kind == "text":
                chunk += event({"token": item.piece.text, "gpu": answering.stream.worker})
            else:
                chunk += event({item.piece.kind: item.piece.text})
        yield chunk or PING
    yield event({"done": True})


def _end(answering: GenerationStream, error: str) -> str:
    if answering.finish == "failed":
        return event({"error": error})
    usage = {
        "prompt_tokens": answering.prompt_tokens,
        "completion_tokens": answering.completion_tokens,
        "seconds": round(answering.seconds, 3),
        "finish_reason": answering.finish,
    }
    return event({"usage": usage})
