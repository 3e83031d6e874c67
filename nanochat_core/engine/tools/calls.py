"""Tool use inside an answer: evaluates what the model writes between python_start and python_end,
and puts the result into the answer between output_start and output_end.

Token ids only, one `ToolCalls` per row, no tensors. A call without a value (see `calculator`), or
whose result does not fit into the row, is ignored: the row continues without a result.
"""

from collections import deque
from dataclasses import dataclass
from typing import Self

from nanochat_core.engine.tools.calculator import calculate
from nanochat_core.tokenizer.bpe import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ToolTokens:
    """The four special tokens of a call, and the tokenizer that reads and writes its text."""

    tokenizer: Tokenizer
    python_start: int
    python_end: int
    output_start: int
    output_end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Look up the special tokens of `tokenizer`."""
        return cls(
            tokenizer=tokenizer,
            python_start=tokenizer.special("<|python_start|>"),
            python_end=tokenizer.special("<|python_end|>"),
            output_start=tokenizer.special("<|output_start|>"),
            output_end=tokenizer.special("<|output_end|>"),
        )


class ToolCalls:
    """One row's state: the call being written, and the tokens its last call has yet to insert."""

    def __init__(self, tokens: ToolTokens) -> None:
        self._tokens = tokens
        self._call: list[int] | None = None  # ids since python_start, while inside a call
        self.forced: deque[int] = deque()  # ids that come next, whatever the model would sample

    def see(self, token: int, *, room: int) -> None:
        """Follow the row's next token; `room` is how many more the row can hold after it."""
        if token == self._tokens.python_start:
            self._call = []
        elif self._call is None:
            return
        elif token != self._tokens.python_end:
            self._call.append(token)
        else:
            result = calculate(self._tokens.tokenizer.decode(self._call))
            self._call = None
            if result is not None:
                self._insert(result, room)

    def _insert(self, result: str, room: int) -> None:
        # Whole or not at all: half a result would be read as another number. + 2: its two marks.
        ids = self._tokens.tokenizer.encode(result)
        if len(ids) + 2 <= room:
            self.forced.extend([self._tokens.output_start, *ids, self._tokens.output_end])
