"""The forms of requests and their limits; refusals name the limit and never quote what was sent.

    {"messages": [{"role": "user" | "assistant" | "system", "content": "..."}, ...],
     "temperature": 0.6, "top_k": 50, "max_tokens": 512, "seed": 7}

All but the messages may be left out. Unknown keys are ignored, as OpenAI's clients send many. The
forms of OpenAI's own routes, which share these limits, are in openai_schema.py.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

MAX_BODY_BYTES = 2**20
MAX_PARTS = 40_000  # commas and brackets: they determine a parser's time and memory
MAX_MESSAGES = 500
MAX_MESSAGE_CHARS = 8_000
MAX_TOTAL_CHARS = 32_000
MAX_TEMPERATURE = 2.0
MAX_TOP_K = 200  # 0: all tokens
MAX_TOKENS = 4096
SEEDS = 2**63  # a seed is from -SEEDS to SEEDS - 1
DEFAULTS = {"temperature": 0.6, "top_k": 50, "max_tokens": 512}
LIMITS = {
    "messages": [1, MAX_MESSAGES],
    "message_characters": [1, MAX_MESSAGE_CHARS],
    "total_characters": [1, MAX_TOTAL_CHARS],
    "temperature": [0.0, MAX_TEMPERATURE],
    "top_k": [0, MAX_TOP_K],
    "max_tokens": [1, MAX_TOKENS],
    "body_bytes": [0, MAX_BODY_BYTES],
}


def as_integer(value: Any) -> Any:
    """Return 3.0 as 3: to JSON Schema, which describes the forms, both are integers."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= SEEDS
    return int(value) if is_whole else value


INTEGER = BeforeValidator(as_integer)
Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
TopK = Annotated[int, Field(ge=0, le=MAX_TOP_K), INTEGER]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), INTEGER]
Seed = Annotated[int, Field(ge=-SEEDS, le=SEEDS - 1), INTEGER]


# The rules that JSON Schema cannot express, as text for the OpenAPI document.
CONVERSATION = (
    "After a system message, which may be missing, user and assistant take turns; the last is the "
    f"user's. All messages together have at most {MAX_TOTAL_CHARS} characters."
)


class RequestError(Exception):
    """A request that is refused. `status`: 422 not of this form, 400 over a limit, 413 too big,
    415 not declared as JSON. `param`: the field that caused it."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Form(BaseModel):
    """Base of all forms: exact types, finite numbers, and no input in its errors."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


def only_assistants_may_be_silent(said: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema condition that applies `said` to content of all other roles."""
    is_assistant = {"properties": {"role": {"const": "assistant"}}}
    return {"if": is_assistant, "else": {"properties": {"content": said}}}


class Message(Form):
    """One message of a conversation."""

    model_config = ConfigDict(json_schema_extra=only_assistants_may_be_silent({"minLength": 1}))

    role: Literal["user", "assistant", "system"]
    content: Annotated[str, Field(max_length=MAX_MESSAGE_CHARS)]


class ChatRequest(Form):
    """A conversation to continue, and how."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MAX_MESSAGES, description=CONVERSATION)
    ]
    temperature: Temperature | None = None
    top_k: TopK | None = None
    max_tokens: MaxTokens | None = None
    seed: Seed | None = None


AnyForm = TypeVar("AnyForm", bound=Form)


def parse(form: type[AnyForm], body: bytes) -> AnyForm:
    """Parse the request in `body`, JSON in UTF-8. Raises RequestError."""
    if len(body) > MAX_BODY_BYTES:
        raise too_big()
    # Counted before parsing: a megabyte of brackets would block the event loop for long.
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_PARTS:
        raise RequestError(400, f"the body has more than {MAX_PARTS} commas and opening brackets")
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    # Outside of `except`: as the cause, pydantic's error would carry the input into a traceback.
    raise _refusal(first)


def check_turns(messages: Sequence[tuple[str, str]]) -> None:
    """Refuse a conversation of (role, content) that is too long, or whose roles do not alternate.

    An assistant's message may be empty: a model may well have ended its answer at once.
    """
    for index, (role, content) in enumerate(messages):
        if not content and role != "assistant":
            raise RequestError(
                400,
                f"message {index} is 0 characters long, it may have 1 to {MAX_MESSAGE_CHARS}",
                param="messages",
            )
    total = sum(len(content) for _, content in messages)
    if total > MAX_TOTAL_CHARS:
        raise RequestError(
            400,
            f"the conversation is {total} characters long, at most {MAX_TOTAL_CHARS} are read",
            param="messages",
        )
    roles = [role for role, _ in messages]
    # An odd number of turns: the last one is then the user's.
    turns = roles[1:] if roles[0] == "system" else roles
    expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
    if turns != expected or len(turns) % 2 == 0:
        raise RequestError(
            400,
            "after a system message, user and assistant take turns; the last is the user's",
            param="messages",
        )


def too_big() -> RequestError:
    """Return the refusal of a body above MAX_BODY_BYTES."""
    return RequestError(413, f"the request is larger than {MAX_BODY_BYTES} bytes")


def _refusal(error: ErrorDetails) -> RequestError:
    """Return pydantic's first error as a RequestError."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "json_invalid":
        return RequestError(422, "the body is not JSON in UTF-8")
    where = _place(error["loc"])
    param = str(error["loc"][0]) if error["loc"] else None
    if kind in _OVER_LIMIT:
        return RequestError(
            400, f"{where} {_OVER_LIMIT[kind](error['input'], context)}", param=param
        )
    if kind == "literal_error":
        return RequestError(400, f"{where} must be {context['expected']}", param=param)
    return RequestError(
        422, f"{where}: {_FORMS.get(kind, 'not of the expected form')}", param=param
    )


def _place(location: tuple[int | str, ...]) -> str:
    """Format messages.3.content as `message 3: content`; only names of fields, as a key that was
    sent may be anything."""
    if not location:
        return "the body"
    first, *rest = location
    if first == "messages" and rest:
        where = f"message {rest[0]}"
        names = [str(name) for name in rest[1:] if name in ("role", "content", "type", "text")]
        return f"{where}: {names[0]}" if names else where
    return str(first)


def _number(value: Any) -> str:
    """Format a refused number, if it is short."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if isinstance(value, int | float) and abs(value) < 1e18:
        return str(value)
    return "too large"


_OVER_LIMIT = {
    "greater_than_equal": lambda v, c: f"is {_number(v)}, it must be at least {c['ge']}",
    "greater_than": lambda v, c: f"is {_number(v)}, it must be more than {c['gt']}",
    "less_than_equal": lambda v, c: f"is {_number(v)}, it may be at most {c['le']}",
    "finite_number": lambda v, c: "is not a finite number",
    "string_too_long": lambda v, c: f"is {len(v)} characters long, it may have {c['max_length']}",
    "string_too_short": lambda v, c: f"is {len(v)} characters long, it needs {c['min_length']}",
    "too_long": lambda v, c: f"has {len(v)} entries, it may have {c['max_length']}",
    "too_short": lambda v, c: f"has {len(v)} entries, it needs {c['min_length']}",
    "not_done": lambda v, c: "has a value that this server does not support; leave it out",
}
_FORMS = {
    "missing": "is missing",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be text",
    "string_unicode": "must be text of whole characters",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be an integer of at most 64 bits",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
}
