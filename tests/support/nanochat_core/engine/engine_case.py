"""Engines on a runner by name, and what is asked of them."""

from functools import partial
from typing import Any

import pytest

from nanochat_core.engine.engine import Engine
from nanochat_core.engine.native import build
from nanochat_core.engine.requests import Request
from nanochat_core.engine.runners.choose import open_runner
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.engine.scheduler_case import Asked

NO_KERNELS = build.unable_here()
needs_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
RUNNERS = [pytest.param("native", marks=needs_kernels), "torch"]


def engine_on(runner: str, model: GPT, tokenizer: Tokenizer, *, num_slots: int = 2) -> Engine:
    """An engine on the runner of that name."""
    engine = Engine(model, tokenizer)
    engine._open_runner = partial(
        open_runner, num_slots=num_slots, max_len=None, memory=10**8, runner=runner
    )
    return engine


def ask(engine: Engine, prompt: list[int], **changes: Any) -> Asked:
    asked = Asked()
    asked.handle = engine.submit(Request(prompt=prompt, sink=asked.take, **changes))
    return asked
