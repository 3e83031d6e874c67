"""A small tokenizer and random models of every era, and an object that runs a command."""

import os
from pathlib import Path
from typing import Any

from nanochat_core.eras import ERAS, numerics, of_era
from nanochat_core.interop.nanochat_files import write_checkpoint
from nanochat_core.model.checkpoint import save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from tests.support.nanochat_core.random_gpt import randomise, shape_of

SHAPE = shape_of(*[256] * 4)


def a_tokenizer() -> Tokenizer:
    words = [b"th", b"he", b"in", b" t", b" a", b"er", b"the", b" the", b"on", b"re", b"an"]
    tokens = [bytes([i]) for i in range(256)] + words
    filler = [f"~{i:02}".encode() for i in range(300 - len(SPECIAL_TOKENS) - len(tokens))]
    return Tokenizer({token: rank for rank, token in enumerate(tokens + filler)})


def a_model(era: str, *, precision: str = "fp32") -> GPT:
    config = of_era(SHAPE, era, pattern="L" if ERAS[era].short_window is None else "SL")
    return randomise(GPT(config, numerics(precision, era=era)), seed=7)


def a_directory(directory: Path, era: str) -> Path:
    """Write a model of an era below `directory`; return its own directory."""
    model, words = directory / "model", directory / "words"
    for path in (model, words):
        path.mkdir(parents=True)
    a_tokenizer().save(words)
    save_model(model, a_model(era), tokenizer=words, optimizer=None, made_by="sft")
    return model


def a_checkpoint(directory: Path, era: str = "2026-03-14", *, step: int = 20) -> Path:
    """Write a checkpoint as nanochat does into `directory`, with its tokenizer; return it."""
    directory.mkdir(parents=True)
    write_checkpoint(directory, a_model(era), a_tokenizer(), step=step, extra={})
    return directory


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)
