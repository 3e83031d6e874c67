"""A server with the engine that has no model, and a small random model that is served."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.nanochat_core.server.byte_tokenizer import TOKENIZER
from tests.support.nanochat_core.server.live import Live, serving


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """One server for all tests that leave it as it was."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """OpenAI's own client library; its import costs a second that few files need."""
    import openai

    return openai


@pytest.fixture(scope="session")
def client(live: Live, openai: ModuleType) -> Iterator[Any]:
    """OpenAI's client of the shared server."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers and a long context, on disk."""
    from nanochat_core.model.checkpoint import save_model  # torch is loaded here
    from tests.support.nanochat_core.random_gpt import random_gpt

    model = random_gpt(64, 4096)
    model.lm_head.weight.data[256:] = 0.0  # special tokens are unlikely: answers are long
    directory = tmp_path_factory.mktemp("models") / "my_model"
    (directory / "tokenizer").mkdir(parents=True)
    TOKENIZER.save(directory / "tokenizer")
    save_model(directory, model, tokenizer=directory / "tokenizer", optimizer={}, made_by="sft")
    return directory
