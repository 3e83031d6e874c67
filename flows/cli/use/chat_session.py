"""A conversation with a chat model, one streamed answer at a time.

The model sees the very tokens it wrote before, tool results included, not a re-encoding of them.
When the context is full, the oldest turns are forgotten.
"""

import codecs
import logging
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from nanochat_core.errors import ConfigError

if TYPE_CHECKING:
    from nanochat_core.engine.engine import Engine
    from nanochat_core.tokenizer.bpe import Tokenizer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn. Raises ConfigError on values that cannot be."""

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
    """The turns so far, and the model that answers."""

    def __init__(
        self, engine: "Engine", tokenizer: "Tokenizer", *, context: int, sampling: Sampling
    ) -> None:
        self.sampling = sampling
        self._engine = engine
        self._tokenizer = tokenizer
        self._context = context
        self._turns: list[list[int]] = []  # token ids of a question and, once given, its answer
        self._answers = 0  # with this seed
        self.forgotten = 0  # turns that the context had no room for, since the last `clear`

    @classmethod
    def open(cls, directory: Path, *, sampling: Sampling, device: str) -> Self:
        """Load the model in `directory`. Raises ModelError when it is not one."""
        from nanochat_core.engine.engine import Engine
        from nanochat_core.model.checkpoint import load_config, load_model
        from nanochat_core.tokenizer.bpe import Tokenizer

        config, _ = load_config(directory)
        import torch

        tokenizer = Tokenizer.load(directory / "tokenizer")
        model = load_model(directory, torch.device(device))
        engine = Engine(
            model,
            tokenizer,
            num_slots=1,
            on_choice=lambda choice: _LOG.info("answers: %s", choice),
        )
        return cls(engine, tokenizer, context=config.sequence_len, sampling=sampling)

    @property
    def parameters(self) -> int:
        """How many numbers the model has learnt."""
        return sum(parameter.numel() for parameter in self._engine.model.parameters())

    def clear(self) -> None:
        """Forget the conversation."""
        self._turns.clear()
        self.forgotten = 0

    def reseed(self, seed: int) -> None:
        """Draw the next answers as a session does that begins with `seed`."""
        self.sampling = replace(self.sampling, seed=seed)
        self._answers = 0

    def answer(self, text: str) -> Generator[str]:
        """Ask `text`; yields the answer in pieces of whole characters.

        Closing the generator early keeps what was said as the model's answer. Raises ConfigError
        when the question alone does not fit the context.
        """
        question = self._question(text)
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
            yield from readable(self._tokenizer, self._tokens(prompt, sampling, turn))
        finally:
            turn.append(self._tokenizer.special("<|assistant_end|>"))

    def _question(self, text: str) -> list[int]:
        special = self._tokenizer.special
        return [
            special("<|user_start|>"),
            # What was typed may hold bytes that are no text: half a letter, another encoding.
            *self._tokenizer.encode(text.encode("utf-8", "replace").decode()),
            special("<|user_end|>"),
            special("<|assistant_start|>"),
        ]

    def _prompt(self) -> list[int]:
        """The newest turns that leave at least a quarter of the context to the answer."""
        while 1 + sum(map(len, self._turns)) > self._longest:
            del self._turns[0]
            self.forgotten += 1
        return [self._tokenizer.bos, *(token for turn in self._turns for token in turn)]

    @property
    def _longest(self) -> int:
        return self._context - self._context // 4

    def _tokens(self, prompt: list[int], sampling: Sampling, turn: list[int]) -> Iterator[int]:
        """The answer's tokens without the one that ends it; each is added to `turn`."""
        self._answers += 1
        for column, _ in self._engine.generate(
            prompt,
            num_samples=1,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k or None,
            seed=sampling.seed + self._answers - 1,
        ):
            if column[0] in self._engine.ends:
                return
            turn.append(column[0])
            yield column[0]


def readable(tokenizer: "Tokenizer", tokens: Iterable[int]) -> Iterator[str]:
    """What each token adds to the text, in whole characters; tokens that add nothing are skipped.

    A calculator call reads `<<12*3=36>>`, one without a value `<<12*>>`.
    """
    call_ended, result = tokenizer.special("<|python_end|>"), tokenizer.special("<|output_start|>")
    shown = {tokenizer.special("<|python_start|>"): "<<", call_ended: "", result: "="}
    shown[tokenizer.special("<|output_end|>")] = ">>"
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    before = None
    for token in tokens:
        text = ">>" if before == call_ended and token != result else ""
        before = token
        if token in shown:
            text = decoder.decode(b"", final=True) + text + shown[token]
        else:
            text += decoder.decode(tokenizer.decode_bytes([token]))
        if text:
            yield text
    text = decoder.decode(b"", final=True) + (">>" if before == call_ended else "")
    if text:
        yield text
