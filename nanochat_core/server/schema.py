"""What a chat request may ask for, checked by hand so that a refusal names its limit and nothing
else: no part of the request is repeated in an error or a log.

    {"messages": [{"role": "user" | "assistant" | "system", "content": "..."}, ...],
     "temperature": 0.8, "top_k": 50, "max_tokens": 512}

The last three may be left out. Unknown keys are ignored, as OpenAI's clients send many.
"""

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

MAX_BODY_BYTES = 2**20
MAX_MESSAGES = 500
MAX_MESSAGE_CHARS = 8_000
MAX_TOTAL_CHARS = 32_000
TEMPERATURE = (0.0, 2.0)
TOP_K = (0, 200)  # 0: all tokens
MAX_TOKENS = (1, 4096)
DEFAULTS = {"temperature": 0.8, "top_k": 50, "max_tokens": 512}

Message: TypeAlias = dict[str, str]


class RequestError(Exception):
    """A request that is refused. `status`: 422 not of this form, 400 over a limit, 413 too big."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A conversation to continue, and how."""

    messages: tuple[Message, ...]  # an optional system message, then user and assistant in turns
    temperature: float
    top_k: int
    max_tokens: int


def parse_chat_request(body: bytes) -> ChatRequest:
    """The request in `body`, JSON in UTF-8. Raises RequestError."""
    if len(body) > MAX_BODY_BYTES:
        raise too_big()
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(422, "the body is not JSON") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("messages"), list):
        raise RequestError(422, "the body must be an object with a list of messages")
    return ChatRequest(
        messages=_messages(tree["messages"]),
        temperature=float(_number(tree, "temperature", (int, float), TEMPERATURE)),
        top_k=_number(tree, "top_k", (int,), TOP_K),
        max_tokens=_number(tree, "max_tokens", (int,), MAX_TOKENS),
    )


def too_big() -> RequestError:
    """The refusal of a body above MAX_BODY_BYTES."""
    return RequestError(413, f"the request is larger than {MAX_BODY_BYTES} bytes")


def _messages(values: list[Any]) -> tuple[Message, ...]:
    if not 1 <= len(values) <= MAX_MESSAGES:
        raise RequestError(400, f"a conversation has 1 to {MAX_MESSAGES} messages")
    messages = tuple(_message(i, value) for i, value in enumerate(values))
    total = sum(len(message["content"]) for message in messages)
    if total > MAX_TOTAL_CHARS:
        raise RequestError(
            400, f"the conversation is {total} characters long, at most {MAX_TOTAL_CHARS} are read"
        )
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
    if turns != expected or len(turns) % 2 == 0:
        raise RequestError(
            400, "after a system message, user and assistant take turns; the last is the user's"
        )
    return messages


def _message(index: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise RequestError(422, f"message {index} is not an object")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise RequestError(422, f"message {index} needs a role and a content, both text")
    if role not in ("user", "assistant", "system"):
        raise RequestError(400, f"message {index}: the role must be user, assistant or system")
    if not 1 <= len(content) <= MAX_MESSAGE_CHARS:
        raise RequestError(
            400,
            f"message {index} is {len(content)} characters long, "
            f"it may have 1 to {MAX_MESSAGE_CHARS}",
        )
    return {"role": role, "content": content}


def _number(
    tree: dict[str, Any], name: str, kinds: tuple[type, ...], limits: tuple[float, float]
) -> Any:
    value = tree.get(name)
    if value is None:
        return DEFAULTS[name]
    if type(value) not in kinds:
        kind = "an integer" if float not in kinds else "a number"
        raise RequestError(422, f"{name} must be {kind}")
    low, high = limits
    if not low <= value <= high:
        raise RequestError(400, f"{name} must be from {low} to {high}")
    return value
