"""Formats a choice in the two shapes of OpenAI's routes: chat, and plain text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanochat_core.server.service import Finish, StreamEvent
from nanochat_core.server.text import TextToken
from nanochat_core.server.workers.pool import Pool

LEAST_LOG_PROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


@dataclass(kw_only=True)
class Gathered:
    """A choice so far, if it is not streamed."""

    index: int
    pool: Pool
    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, told: StreamEvent) -> None:
        """Append an event of this choice; calculator calls are left out."""
        if told.piece and told.piece.kind == "text":
            self.text += told.piece.text
            self.tokens += told.tokens
        self.finish = told.finish or self.finish


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A route's format of choices."""

    prefix: str  # of the response's id
    kind: str
    chunk_kind: str
    opening: Callable[[int], list[dict[str, Any]]]  # of choice i, before its text
    part: Callable[[int, StreamEvent, Pool], list[dict[str, Any]]]
    whole: Callable[[Gathered], dict[str, Any]]


def _chat_opening(index: int) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": ""}
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]


def _chat_part(index: int, told: StreamEvent, pool: Pool) -> list[dict[str, Any]]:
    choice: dict[str, Any] = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
    if told.piece and told.piece.kind == "text":
        logs = _chat_log_probs(told.tokens, pool)
        return [{**choice, "delta": {"content": told.piece.text}, "logprobs": logs}]
    return [{**choice, "finish_reason": _reason(told.finish)}] if told.finish else []


def _chat_whole(choice: Gathered) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _chat_log_probs(choice.tokens, choice.pool),
        "finish_reason": _reason(choice.finish),
    }


def _text_part(index: int, told: StreamEvent, pool: Pool) -> list[dict[str, Any]]:
    choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
    if told.piece and told.piece.kind == "text":
        logs = _text_log_probs(told.tokens, pool)
        return [{**choice, "text": told.piece.text, "logprobs": logs}]
    return [{**choice, "finish_reason": _reason(told.finish)}] if told.finish else []


def _text_whole(choice: Gathered) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": _text_log_probs(choice.tokens, choice.pool),
        "finish_reason": _reason(choice.finish),
    }


def _no_opening(index: int) -> list[dict[str, Any]]:
    return []


CHAT = Shape(
    prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    opening=_chat_opening,
    part=_chat_part,
    whole=_chat_whole,
)
TEXT = Shape(
    prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    opening=_no_opening,
    part=_text_part,
    whole=_text_whole,
)


def _reason(finish: Finish | None) -> str:
    # OpenAI's clients know no other reasons; a failed answer never gets here.
    return "length" if finish == "length" else "stop"


def _chat_log_probs(tokens: Sequence[TextToken], pool: Pool) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            **_chat_token(token.id, token.log_probs.chosen, pool),
            "top_logprobs": [_chat_token(t, value, pool) for t, value in token.log_probs.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: int, log_prob: float, pool: Pool) -> dict[str, Any]:
    return {
        "token": _name(token, pool),
        "logprob": max(log_prob, LEAST_LOG_PROB),
        "bytes": list(pool.tokenizer.decode_bytes([token])),
    }


def _text_log_probs(tokens: Sequence[TextToken], pool: Pool) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "tokens": [_name(token.id, pool) for token in tokens],
        "token_logprobs": [max(token.log_probs.chosen, LEAST_LOG_PROB) for token in tokens],
        "top_logprobs": [
            {_name(t, pool): max(p, LEAST_LOG_PROB) for t, p in token.log_probs.top}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _name(token: int, pool: Pool) -> str:
    r"""Return a token's text, or if it is no whole characters its bytes as OpenAI's: bytes:\xc3."""
    data = pool.tokenizer.decode_bytes([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
