"""A small random model on disk, rows of its vocabulary and a few tasks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanochat_core.job import Job
from nanochat_core.tokenizer.bpe import Tokenizer
from tasks.registry import generate
from tests.support.nanochat_core.row_files import write_rows
from tests.support.small_job import one_thread, small_job
from tests.support.tasks.example_files import write_examples


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte, one more for "##", one for "####", and the special tokens."""
    merged = {b"##": 256, b"####": 257}
    return Tokenizer({bytes([i]): i for i in range(256)} | merged)


@pytest.fixture(scope="session")
def model(tokenizer):
    from tests.support.nanochat_core.random_gpt import random_gpt  # torch is loaded here

    return random_gpt(16, 256, num_kv_heads=1, vocab_size=tokenizer.vocab_size)


@pytest.fixture(scope="session")
def model_dir(model, tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a stage leaves it."""
    from nanochat_core.model.checkpoint import save_model

    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer").mkdir()
    tokenizer.save(directory / "tokenizer")
    save_model(
        directory, model, tokenizer=directory / "tokenizer", optimizer={}, made_by="pretrain"
    )
    return directory


@pytest.fixture(scope="session")
def rows_dir(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten training and seven validation rows of 32 targets, special tokens among them."""
    rng, size = np.random.default_rng(0), tokenizer.vocab_size
    rows = {split: rng.integers(0, size, (n, 33)) for split, n in (("train", 10), ("val", 7))}
    return write_rows(tmp_path_factory.mktemp("rows") / "rows", tokenizer, rows)


@pytest.fixture(scope="session")
def task_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Test examples of the tasks that can be graded."""
    directory = tmp_path_factory.mktemp("task_data")
    for name in ("spelling", "arithmetic"):
        (directory / name).mkdir()
        path = directory / name / "test.jsonl"
        write_examples(path, generate(name, "test", 5, grade=1, seed=0))
    return directory


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """make_job(name, entry, inputs, config, **resources) -> Job in a directory called `name`."""

    def make(
        name: str, entry: str, inputs: dict[str, Path], config: dict[str, Any], **resources: Any
    ) -> Job:
        job = small_job(
            tmp_path / name,
            stage=name,
            entry=entry,
            config=config,
            inputs=inputs,
            resources=one_thread(**{"device_batch_size": 4, **resources}),
        )
        job.output.mkdir(parents=True)
        return job

    return make
