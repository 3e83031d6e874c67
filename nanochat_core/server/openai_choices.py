"""A choice of an answer in the two shapes that OpenAI's routes have: chat, and plain text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanochat_core.engine.requests import LogProbs
from nanochat_core.server.pool import Pool
from nanochat_core.server.service import Finish, Told

LEAST_LOG_PROB = -9999.0  # stands for minus infinity, which JSON has not
Tokens = Sequence[tuple[int, LogProbs]]


@dataclass(kw_only=True)
class Gathered:
    """A choice as far as it has come, where it is not streamed."""

    index: int
    pool: Pool
    text: str = ""
    tokens: list[tuple[int, LogProbs]] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, told: Told) -> None:
        """Go on with what was told of it."""
        if told.piece and told.piece.kind == "text":
            self.text += told.piece.text
            self.tokens += told.tokens
        self.finish = told.finish or self.finish


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a route says it."""

    prefix: str  # of the response's id
    kind: str
    chunk_kind: str
    opening: Callable[[int], list[dict[str, Any]]]  # of choice i, before its text
    part: Callable[[int, Told, Pool, int], list[dict[str, Any]]]  # the last: characters before it
    whole: Callable[[Gathered], dict[str, Any]]


def _chat_opening(index: int) -> list[dict[str, Any]]:
    delta = {"role": "assistant", "content": ""}
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]


def _chat_part(index: int, told: Told, pool: Pool, offset: int) -> list[dict[str, Any]]:
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


def _text_part(index: int, told: Told, pool: Pool, offset: int) -> list[dict[str, Any]]:
    choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
    if told.piece and told.piece.kind == "text":
        logs = _text_log_probs(told.tokens, pool, offset)
        return [{**choice, "text": told.piece.text, "logprobs": logs}]
    return [{**choice, "finish_reason": _reason(told.finish)}] if told.finish else []


def _text_whole(choice: Gathered) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": _text_log_probs(choice.tokens, choice.pool, 0),
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
    return "length" if finish == "length" else "stop"


def _chat_log_probs(tokens: Tokens, pool: Pool) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            **_chat_token(token, told.chosen, pool),
            "top_logprobs": [_chat_token(other, value, pool) for other, value in told.top],
        }
        for token, told in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: int, log_prob: float, pool: Pool) -> dict[str, Any]:
    data = pool.tokenizer.decode_bytes([token])
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(log_prob, LEAST_LOG_PROB),
        "bytes": list(data),
    }


def _text_log_probs(tokens: Tokens, pool: Pool, offset: int) -> dict[str, Any] | None:
    if not tokens:
        return None
    offsets = list[int]()
    for token, _ in tokens:
        offsets.append(offset)
        offset += len(pool.tokenizer.decode([token]))
    return {
        "tokens": [pool.tokenizer.decode([token]) for token, _ in tokens],
        "token_logprobs": [max(told.chosen, LEAST_LOG_PROB) for _, told in tokens],
        "top_logprobs": [
            {pool.tokenizer.decode([t]): max(p, LEAST_LOG_PROB) for t, p in told.top}
            for _, told in tokens
        ],
        "text_offset": offsets,
    }
