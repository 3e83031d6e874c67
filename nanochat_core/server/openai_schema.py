"""The forms of OpenAI's requests, as far as this server gives them a meaning; the rest is ignored.

Beyond OpenAI's: `top_k`, as other servers of open models have it.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from nanochat_core.server.schema import (
    MAX_MESSAGE_CHARS,
    MAX_MESSAGES,
    MAX_TOTAL_CHARS,
    Form,
    MaxTokens,
    Seed,
    Temperature,
    TopK,
)

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_ALTERNATIVES = 50_000  # of all tokens of all choices: what a client that reads slowly may hold
MAX_PROMPTS = 8
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions; OpenAI's


def _join_parts(value: Any) -> Any:
    """[{"type": "text", "text": "a"}, ...] as "a..."; all else as it is."""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        return value
    if any(part.get("type") != "text" for part in value):
        return value
    texts = [part.get("text") for part in value]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_MESSAGE_CHARS},
        {"type": "array", "items": _PART},
    ]
}


def _text_or_list(most: int, characters: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1, "maxLength": characters}
    return {"anyOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": most}]}


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(_text_or_list(MAX_STOPS, MAX_STOP_CHARS)),
]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_TOTAL_CHARS)]
Prompts = Annotated[
    list[Prompt],
    Field(min_length=1, max_length=MAX_PROMPTS),
    BeforeValidator(_as_list),
    WithJsonSchema(_text_or_list(MAX_PROMPTS, MAX_TOTAL_CHARS)),
]


class OpenAIMessage(Form):
    """A message; its content text, or parts of text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        Field(max_length=MAX_MESSAGE_CHARS),
        BeforeValidator(_join_parts),
        WithJsonSchema(_CONTENT),
    ]


class StreamOptions(Form):
    """What a stream tells besides the answer."""

    include_usage: bool | None = None


class Sampled(Form):
    """What both routes share."""

    model: str | None = None  # any: there is one
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatCompletionRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[OpenAIMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class CompletionRequest(Sampled):
    """POST /v1/completions: the prompt is the beginning of a document."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
