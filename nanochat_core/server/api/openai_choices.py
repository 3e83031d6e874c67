"""Formats a choice in the two shapes of OpenAI's routes: chat, and plain text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanochat_core.server.service import Finish, StreamEvent
from nanochat_core.server.text import TextToken
from nanochat_core.tokenizer.bpe import Tokenizer

MIN_LOG_PROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


@dataclass(kw_only=True)
class Gathered:
    """A choice so far, if it is not streamed."""

    text: str = ""
    tokens: list[TextToken] = field(default_factory=list)
    finish: Finish | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A route's format of choices."""

    prefix: str  # of the response's id
    kind: str
    chunk_kind: str
    opening: dict[str, Any] | None  # what a streamed choice has before its text
    delta: Callable[[str], dict[str, Any]]  # what it has of a piece of text
    closing: dict[str, Any]  # what it has at its end
    whole: Callable[[str], dict[str, Any]]  # what a choice has if it is not streamed
    log_probs: Callable[[Sequence[TextToken], Tokenizer], dict[str, Any]]
    shows_markers: bool  # of final numbers: for graders, not for people

    def open(self, index: int) -> list[dict[str, Any]]:
        """Return the choices to send before any text."""
        return [] if self.opening is None else [_choice(index, self.opening)]

    def stream(self, index: int, event: StreamEvent, tokenizer: Tokenizer) -> list[dict[str, Any]]:
        """Return the choices to send for an event; calculator calls are left out."""
        text, tokens = self._text(event)
        if text:
            logs = self.log_probs(tokens, tokenizer) if tokens else None
            return [_choice(index, self.delta(text), logs)]
        return [_choice(index, self.closing, finish=event.finish)] if event.finish else []

    def add(self, choice: Gathered, event: StreamEvent) -> None:
        """Append an event to a choice that is not streamed; calculator calls are left out."""
        text, tokens = self._text(event)
        choice.text += text
        choice.tokens += tokens
        choice.finish = event.finish or choice.finish

    def gather(self, index: int, choice: Gathered, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return a choice that is not streamed."""
        logs = self.log_probs(choice.tokens, tokenizer) if choice.tokens else None
        return _choice(index, self.whole(choice.text), logs, choice.finish)

    def _text(self, event: StreamEvent) -> tuple[str, Sequence[TextToken]]:
        """Return the text of an event, and the tokens that it was decoded from."""
        piece = event.piece
        if piece is None or piece.kind != "text":
            return "", ()
        if self.shows_markers:
            return piece.written, event.tokens
        return piece.text, () if piece.marker else event.tokens


def _choice(
    index: int,
    content: dict[str, Any],
    log_probs: dict[str, Any] | None = None,
    finish: Finish | None = None,
) -> dict[str, Any]:
    # OpenAI's clients know no reasons but length and stop; a failed answer never gets here.
    reason = "length" if finish == "length" else "stop" if finish else None
    return {"index": index, **content, "logprobs": log_probs, "finish_reason": reason}


def _chat_log_probs(tokens: Sequence[TextToken], tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": _name(token, tokenizer),
            "logprob": max(log_prob, MIN_LOG_PROB),
            "bytes": list(tokenizer.decode_bytes([token])),
        }

    content = [
        {
            **entry(token.id, token.log_probs.chosen),
            "top_logprobs": [entry(*top) for top in token.log_probs.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _text_log_probs(tokens: Sequence[TextToken], tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": [_name(token.id, tokenizer) for token in tokens],
        "token_logprobs": [max(token.log_probs.chosen, MIN_LOG_PROB) for token in tokens],
        # As OpenAI's, with the sampled token, even if all of the likeliest are others.
        "top_logprobs": [
            {
                _name(t, tokenizer): max(p, MIN_LOG_PROB)
                for t, p in (*token.log_probs.top, (token.id, token.log_probs.chosen))
            }
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def _name(token: int, tokenizer: Tokenizer) -> str:
    r"""Return a token's text, or if it is no whole characters its bytes as OpenAI's: bytes:\xc3."""
    data = tokenizer.decode_bytes([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


CHAT = Shape(
    prefix="chatcmpl",
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text}},
    closing={"delta": {}},
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    log_probs=_chat_log_probs,
    shows_markers=False,
)
TEXT = Shape(
    prefix="cmpl",
    kind="text_completion",
    chunk_kind="text_completion",
    opening=None,
    delta=lambda text: {"text": text},
    closing={"text": ""},
    whole=lambda text: {"text": text},
    log_probs=_text_log_probs,
    shows_markers=True,
)
