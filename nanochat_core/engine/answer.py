"""The state of one answer while it is written: its tokens, tool calls, limit and end.

Every way of decoding (one prompt, many, with a cache or without) writes through `Answer`, so that
stop tokens, tool calls and limits have one meaning.
"""

from dataclasses import dataclass

from nanochat_core.engine.tools.calls import ToolCalls, ToolTokens
from nanochat_core.tokenizer.bpe import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer without its prompt and without the token that ended it."""

    ids: list[int]
    mask: list[int]  # of `ids`: 1 sampled by the model, 0 forced by a tool
    finished: bool  # the model ended it; otherwise it ran into its limit


def end_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer."""
    # bos too: it begins the next document, so a model that writes it has finished this one.
    return frozenset((tokenizer.special("<|assistant_end|>"), tokenizer.bos))


class Answer:
    """The growing answer of one row. It may hold `limit` tokens, the ending one not counted."""

    def __init__(self, tools: ToolTokens, *, ends: frozenset[int], limit: int) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.finished = False
        self.last = -1  # the token of the latest step, the ending one included
        self._calls = ToolCalls(tools)
        self._ends = ends
        self.limit = limit

    @property
    def is_over(self) -> bool:
        """True if no token may follow."""
        return self.finished or len(self.ids) >= self.limit

    @property
    def is_forced(self) -> bool:
        """True if a tool's result provides the next token."""
        return bool(self._calls.forced)

    def take(self, sampled: int) -> None:
        """Write one token: the next one of a tool's result, or else `sampled`."""
        if self._calls.forced:
            token, sampled_by_model = self._calls.forced.popleft(), 0
        else:
            token, sampled_by_model = sampled, 1
        self.last = token
        # The ending token is reported as `last`, but is no part of the answer.
        if token in self._ends:
            self.finished = True
            return
        self.ids.append(token)
        self.mask.append(sampled_by_model)
        self._calls.see(token, room=self.limit - len(self.ids))

    def completion(self) -> Completion:
        """Return the answer as it is."""
        return Completion(ids=self.ids, mask=self.mask, finished=self.finished)
