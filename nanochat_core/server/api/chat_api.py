"""nanochat's own route, POST /chat/completions: a conversation in, server-sent events out.

data: {"token": "...", "gpu": 0}           text, as it is written
data: {"token": "", "gpu": 0, "marker": "#### "}     the model wrote the marker of a final number
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
from nanochat_core.server.api.http import PING, EventStream, event
from nanochat_core.server.api.prompts import prepare_chat_prompt
from nanochat_core.server.api.schema import DEFAULTS, ChatRequest
from nanochat_core.server.service import GenerationStream, Service, engine_seed
from nanochat_core.server.workers.ipc import EngineRequest

LEAST = 1e-6  # of temperature and top_p: in float32, which the engine uses, less becomes 0


async def chat_completions(request: Request, form: ChatRequest) -> Response:
    """Stream the answer to a conversation."""
    service: Service = request.app.state.service
    messages = [(message.role, message.content) for message in form.messages]
    max_tokens = form.max_tokens or int(DEFAULTS["max_tokens"])
    pool, prompt = await prepare_chat_prompt(service, messages, max_tokens=max_tokens)
    generation = GenerationStream(
        service,
        pool,
        EngineRequest(
            prompt=prompt,
            num_samples=1,
            max_tokens=max_tokens,
            params=sampling_params(form.temperature, form.top_k),
            seed=engine_seed(form.seed),
            cache_salt=request.state.cache_salt,
        ),
    )
    request.state.generation = generation
    return EventStream(_stream(generation), on_end=generation.close)


def sampling_params(
    temperature: float | None, top_k: int | None, top_p: float | None = None
) -> SamplingParams:
    """Return sampling parameters, with this server's defaults for those that are None."""
    temperature = DEFAULTS["temperature"] if temperature is None else temperature
    top_k = int(DEFAULTS["top_k"]) if top_k is None else top_k
    top_p = 1.0 if top_p is None else top_p
    if temperature < LEAST or top_p < LEAST:
        return SamplingParams(temperature=0.0)
    return SamplingParams(temperature=temperature, top_k=top_k or None, top_p=top_p)


async def _stream(generation: GenerationStream) -> AsyncIterator[str]:
    async for items in generation.events():
        # One chunk for all that came together: one write, not one per token.
        chunk = ""
        for item in items:
            if item.piece is None:
                chunk += _end(generation, item.error)
            elif item.piece.kind == "text":
                marker = {"marker": item.piece.marker} if item.piece.marker else {}
                chunk += event(
                    {"token": item.piece.text, "gpu": generation.stream.worker, **marker}
                )
            else:
                chunk += event({item.piece.kind: item.piece.text})
        yield chunk or PING
    yield event({"done": True})


def _end(generation: GenerationStream, error: str) -> str:
    if generation.finish == "failed":
        return event({"error": error})
    usage = {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "seconds": round(generation.seconds, 3),
        "finish_reason": generation.finish,
    }
    return event({"usage": usage})
