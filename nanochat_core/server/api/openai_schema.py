"""The forms of OpenAI's requests, as far as this server supports them.

Options that would change the answer and are not supported are refused, unless their value has no
effect (`echo: false`); all others are ignored. `top_k` is an addition that other servers of open
models have too.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from nanochat_core.server.api.schema import (
    CONVERSATION,
    INTEGER,
    MAX_MESSAGE_CHARS,
    MAX_MESSAGES,
    MAX_TOTAL_CHARS,
    Form,
    MaxTokens,
    Seed,
    Temperature,
    TopK,
    as_integer,
    only_assistants_may_be_silent,
)

# The limits of stop strings and of alternatives are OpenAI's.
MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_ALTERNATIVES = 50_000  # of all tokens of all choices: what a client that reads slowly may hold
MAX_PROMPTS = 8
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions; OpenAI's


def _join_parts(value: Any) -> Any:
    """Join [{"type": "text", "text": "a"}, ...] to "a...", and null to ""; return all else as it
    is, for pydantic to refuse."""
    if value is None:
        return ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        return value
    if any(part.get("type") != "text" for part in value):
        return value
    texts = [part.get("text") for part in value]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    """Return one prompt, text or tokens, as a list of one."""
    items: list[Any] = value if isinstance(value, list) else []
    is_tokens = items and all(isinstance(as_integer(item), int) for item in items)
    return [value] if is_tokens else _as_list(value)


def _kind_of_prompt(value: Any) -> str:
    return "tokens" if isinstance(value, list) else "text"


class Only:
    """An option that is not supported: only null and the values that have no effect are valid."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema that checks the value; pydantic calls this."""
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the valid values for the OpenAPI document; pydantic calls this."""
        return {"enum": [None, *self._neutral]}

    def _check(self, value: Any) -> Any:
        if value is not None and value not in self._neutral:
            raise PydanticCustomError("not_done", "is not supported here")
        return value


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_MESSAGE_CHARS},
        {"type": "array", "items": _PART},
        {"type": "null"},
    ]
}


_TOKENS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "minItems": 1,
    "maxItems": MAX_TOTAL_CHARS,
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
Text = Annotated[str, Field(min_length=1, max_length=MAX_TOTAL_CHARS)]
Tokens = Annotated[list[Annotated[int, INTEGER]], Field(min_length=1, max_length=MAX_TOTAL_CHARS)]
# A discriminated union: errors are of the kind that was sent, not of both.
Prompts = Annotated[
    list[
        Annotated[
            Annotated[Text, Tag("text")] | Annotated[Tokens, Tag("tokens")],
            Discriminator(_kind_of_prompt),
        ]
    ],
    Field(min_length=1, max_length=MAX_PROMPTS),
    BeforeValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                *_text_or_list(MAX_PROMPTS, MAX_TOTAL_CHARS)["anyOf"],
                _TOKENS,
                {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class OpenAIMessage(Form):
    """A message; its content text, parts of text, or null where the assistant said nothing."""

    model_config = ConfigDict(
        json_schema_extra=only_assistants_may_be_silent(
            {
                "type": ["string", "array"],
                "minLength": 1,
                "minItems": 1,
                "items": {"properties": {"text": {"minLength": 1}}},
            }
        )
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        Field(max_length=MAX_MESSAGE_CHARS),
        BeforeValidator(_join_parts),
        WithJsonSchema(_CONTENT),
    ]


class StreamOptions(Form):
    """The options of a stream."""

    include_usage: bool | None = None


class SampledForm(Form):
    """The fields that both routes share."""

    model: str | None = None  # any: there is one
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None  # 0: the likeliest token
    top_k: TopK | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), INTEGER] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    logit_bias: Annotated[Any, Only({})] = None


class ChatCompletionRequest(SampledForm):
    """POST /v1/chat/completions."""

    messages: Annotated[
        list[OpenAIMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, description=CONVERSATION),
    ]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGER] | None = None
    # "auto": the model may always choose to use none.
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    modalities: Annotated[Any, Only(["text"])] = None


class CompletionRequest(SampledForm):
    """POST /v1/completions: the prompt is the beginning of a document.

    A prompt of tokens is read as it is: nothing is put before it, and special ones are special.
    """

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=5), INTEGER] | None = None
    best_of: Annotated[int, Field(ge=1), INTEGER] | None = None  # as many as n
    echo: Annotated[Any, Only(False)] = None
    suffix: Annotated[Any, Only("")] = None
