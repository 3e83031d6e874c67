"""A conversation with a chat model, one streamed answer at a time.

The prompt holds the tokens that the model wrote before, tool results included, and not a new
encoding of their text, which could differ. When the context is full, the oldest turns are dropped.
"""

import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from nanochat_core.errors import ConfigError

if TYPE_CHECKING:
    from nanochat_core.engine.engine import Engine
    from nanochat_core.server.text import TextPiece
    from nanochat_core.tokenizer.bpe import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of answers. Raises ConfigError on values out of range."""

    temperature: float  # 0: always the likeliest token
    top_k: int  # 0: all tokens
    max_tokens: int  # of one answer
    seed: int

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("temperature", self.temperature, 0, 2),
            ("top-k", self.top_k, 0, 200),
            ("max-tokens", self.max_tokens, 1, 4096),
            ("seed", self.seed, 0, 2**62),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}", hint=f"a number from {low} to {high}")


class ChatSession:
    """A conversation: its turns so far, and the model that answers."""

    def __init__(
        self, engine: "Engine", tokenizer: "Tokenizer", *, context: int, sampling: Sampling
    ) -> None:
        self.sampling = sampling
        self._engine = engine
        self._tokenizer = tokenizer
        self._context = context
        self._turns: list[list[int]] = []  # token ids of a question and, once given, its answer
        self.num_answers = 0  # with this seed
        self.forgotten = 0  # turns that the context had no room for

    @classmethod
    def open(cls, directory: Path, *, sampling: Sampling, device: str) -> Self:
        """Load the model in `directory`. Raises ModelError if it is not one."""
        from nanochat_core.engine.engine import Engine
        from nanochat_core.model.checkpoint import load_config, load_model
        from nanochat_core.tokenizer.bpe import Tokenizer

        # Before torch is imported, which takes seconds: a wrong directory fails at once.
        config, _ = load_config(directory)
        import torch

        tokenizer = Tokenizer.load(directory / "tokenizer")
        model = load_model(directory, torch.device(device))
        engine = Engine(
            model,
            tokenizer,
            precision="auto",
            num_slots=1,  # one conversation, one answer at a time: the least memory
            on_choice=lambda choice: _LOG.info("answers: %s", choice),
        )
        return cls(engine, tokenizer, context=config.sequence_len, sampling=sampling)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(parameter.numel() for parameter in self._engine.model.parameters())

    def clear(self) -> None:
        """Forget the conversation."""
        self._turns.clear()

    def ask(self, text: str) -> str:
        """Return the answer to `text` without its calculator calls; raises like `answer`."""
        return "".join(piece.text for piece in self.answer(text) if piece.kind == "text")

    def answer(self, text: str) -> "Generator[TextPiece]":
        """Ask `text`; yield the answer in pieces: text of whole characters, calls, their results.

        If the generator is closed early, the pieces so far count as the model's answer. Raises
        ConfigError if the question alone does not fit the context.
        """
        from nanochat_core.server.text import answer_pieces

        question = self._question(text)
        # 1 + ...: every prompt begins with BOS.
        if 1 + len(question) > self._longest:
            raise ConfigError(
                f"that message is {len(question)} tokens long, "
                f"this model reads {self._longest - 1}",
                hint="make it shorter",
            )
        self._turns.append(question)
        prompt = self._prompt()
        room = self._context - len(prompt)
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        turn = self._turns[-1]
        try:
            yield from answer_pieces(self._tokenizer, self._tokens(prompt, sampling, turn))
        finally:
            # Also after Ctrl-C: in the next prompt this answer must be closed.
            turn.append(self._tokenizer.special("<|assistant_end|>"))

    def _question(self, text: str) -> list[int]:
        from nanochat_core.tokenizer.chat import render_for_completion

        # Input may hold bytes that are not UTF-8: half a letter, another encoding.
        message = {"role": "user", "content": text.encode("utf-8", "replace").decode()}
        return render_for_completion(self._tokenizer, {"messages": [message]})[1:]  # without BOS

    def _prompt(self) -> list[int]:
        """Return the prompt. Drops old turns until a quarter of the context is free."""
        while 1 + sum(map(len, self._turns)) > self._longest:
            del self._turns[0]
            self.forgotten += 1
        return [self._tokenizer.bos, *(token for turn in self._turns for token in turn)]

    @property
    def _longest(self) -> int:
        return self._context - self._context // 4

    def _tokens(self, prompt: list[int], sampling: Sampling, turn: list[int]) -> Iterator[int]:
        """Yield the answer's tokens without the one that ends it; each is added to `turn`."""
        # Each answer has its own seed: the same question asked twice gets two answers, and the same
        # session typed again gets the same ones.
        self.num_answers += 1
        for column, _ in self._engine.generate(
            prompt,
            num_samples=1,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k or None,
            seed=sampling.seed + self.num_answers - 1,
        ):
            if column[0] in self._engine.ends:
                return
            turn.append(column[0])
            yield column[0]
