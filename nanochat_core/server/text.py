"""Decodes an answer's tokens to text for people: whole characters, calculator calls, stop strings,
and the final number without the marker `####` that graders look for."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from nanochat_core.engine.requests import LogProbs
from nanochat_core.tokenizer.bpe import BOS, Tokenizer

MARKER = "#### "
# The number as `tasks.base.final_number` reads it, alone on its line.
_NUMBER = r"-?[0-9][0-9.,]*[ \t\r]*"
_MARKED_LINE = re.compile(f"{MARKER}{_NUMBER}\n")
_MAYBE_MARKED = re.compile(f"#{{1,4}}|{MARKER}(?:-?|{_NUMBER})")


@dataclass(frozen=True, kw_only=True)
class TextToken:
    """A token of an answer's text, and its log-probabilities."""

    id: int
    log_probs: LogProbs
    offset: int  # characters of the answer's text before those it is part of


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """A part of an answer: text of whole characters, a call's expression, or its result."""

    kind: Literal["text", "tool_call", "tool_result"]
    text: str  # for people
    marker: str | None = None  # what the model wrote instead of `text`, if that is a marker

    @property
    def written(self) -> str:
        """The text that the model wrote."""
        return self.text if self.marker is None else self.marker


class AnswerText:
    """Decodes the tokens of one answer to pieces, each as soon as it is whole.

    Bytes wait until they are characters; those that never become one are U+FFFD. What the model
    writes between <|python_start|> and <|python_end|> is a call, what the calculator puts between
    <|output_start|> and <|output_end|> its result. Other special tokens are nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._first_special = tokenizer.special(BOS)
        self._starts: dict[int, Literal["tool_call", "tool_result"]] = {
            tokenizer.special("<|python_start|>"): "tool_call",
            tokenizer.special("<|output_start|>"): "tool_result",
        }
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside: Literal["tool_call", "tool_result"] | None = None
        self._held: list[int] = []

    def is_text(self, token: int) -> bool:
        """Return whether `token`, if it comes next, is part of text and not of a call."""
        return token < self._first_special and not self._inside

    def take(self, token: int) -> Iterator[TextPiece]:
        """Take the next token and yield the pieces that it completes."""
        if token >= self._first_special:
            yield from self.end()
            self._inside = self._starts.get(token)
        elif self._inside:
            self._held.append(token)
        else:
            yield from _text(self._decoder.decode(self._tokenizer.decode_bytes([token])))

    def end(self) -> Iterator[TextPiece]:
        """Yield what was held back: an incomplete character, or a call that was cut short."""
        # Bytes of an incomplete character must not join those that follow a special token.
        yield from _text(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        if self._inside:
            yield TextPiece(kind=self._inside, text=self._tokenizer.decode(self._held))
            self._inside = None
            self._held.clear()


class MarkerFilter:
    """Replaces the marker of a final number: the line `#### 42` is shown as `42`.

    Graders look for `#### 42`, GSM8K's form, which stands at the start of a line or right after a
    call. Text that may become one is held back, so a heading like `#### 2 examples` stays.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_line_start = True
        self._is_after_call = False

    def take(self, piece: TextPiece) -> Iterator[TextPiece]:
        """Take the next piece and yield what is known of it and of what was held back."""
        if piece.kind != "text":
            yield from self.end()
            self._is_after_call = True
            yield piece
            return
        rest, self._held = self._held + piece.text, ""
        passed = ""
        while rest:
            if self._is_line_start or self._is_after_call:
                if _MAYBE_MARKED.fullmatch(rest):
                    self._held = rest
                    break
                if _MARKED_LINE.match(rest):
                    yield from _text(passed)
                    yield self._replace(MARKER)
                    passed, rest = "", rest[len(MARKER) :]
            line = rest[: rest.find("\n") + 1] or rest
            passed, rest = passed + line, rest[len(line) :]
            self._is_line_start, self._is_after_call = line.endswith("\n"), False
        yield from _text(passed)

    def end(self) -> Iterator[TextPiece]:
        """Yield what was held back, and no more can change."""
        held, self._held = self._held, ""
        if held.startswith(MARKER.rstrip()):  # also one that was cut short
            yield self._replace(held[: len(MARKER)])
            held = held[len(MARKER) :]
        if held:
            self._is_line_start = False
        yield from _text(held)

    def _replace(self, marker: str) -> TextPiece:
        text = "" if self._is_line_start else "\n"  # right after a call, which may not be shown
        self._is_line_start = self._is_after_call = False
        return TextPiece(kind="text", text=text, marker=marker)


def answer_pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[TextPiece]:
    """Yield the pieces of one answer as its tokens come."""
    text, markers = AnswerText(tokenizer), MarkerFilter()
    for token in tokens:
        for piece in text.take(token):
            yield from markers.take(piece)
    for piece in text.end():
        yield from markers.take(piece)
    yield from markers.end()


class StopStrings:
    """Passes text on up to the first of `stops`, which itself is left out.

    Text that may be the beginning of one is held back until that is known.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def take(self, text: str) -> str:
        """Take more text. Returns what can be shown of it and of what was held back."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.found = True
            self._held = ""
            return text[: min(starts)]
        # The longest end of the text that may still become a stop string.
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """Return what was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _text(text: str) -> Iterator[TextPiece]:
    if text:
        yield TextPiece(kind="text", text=text)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`, at most all but
    one of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
