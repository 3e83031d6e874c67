"""A pretraining job small enough to be run, killed and started again many times."""

import hashlib
import json
import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from nanochat_core import scaling
from nanochat_core.config import ModelConfig
from nanochat_core.data import row_files
from nanochat_core.job import Job, Resources
from nanochat_core.runtime.progress import read_events
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.small_job import one_thread

LENGTH, VOCAB, ROWS_PER_STEP = 64, 300, 8
TEXT = "one step after another, and each saved. " * 40 + "".join(map(chr, range(32, 127))) * 4
CLOCKS = ("tokens_per_second", "seconds", "mfu", "eta_seconds", "dollars")


def make_inputs(directory: Path, vocab: int = VOCAB) -> dict[str, Path]:
    """Rows and tokenizer for `make_job`; a large vocabulary is learnt from synthetic words."""
    chance = random.Random(1)
    words = ["".join(chance.choices(ascii_lowercase, k=12)) for _ in range(vocab // 4)]
    text = TEXT if vocab == VOCAB else " ".join(words)
    tokenizer = Tokenizer.train(iter([text]), vocab_size=vocab)
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "tokenizer")
    rows = np.random.default_rng(1).integers(vocab, size=(200, LENGTH + 1)).astype("<u2")
    rows[:, 1::2] = rows[:, :-1:2] // 3  # something to learn
    (directory / "rows").mkdir()
    for split in row_files.SPLITS:
        rows.tofile(directory / "rows" / f"{split}.rows")
    index: dict[str, Any] = {"num_train": len(rows), "num_val": len(rows), "tokens": rows.size}
    index |= {"sequence_len": LENGTH, "dtype": "uint16", "vocab_size": vocab}
    index |= {"tokenizer": tokenizer.digest(), "policy": "default", "waste": 0.0}
    row_files.write_index(directory / "rows", index)
    return {name: directory / name for name in ("rows", "tokenizer")}


def make_job(directory: Path, inputs: dict[str, Path], *, num_steps: int) -> Job:
    """Pretraining that saves after every fifth step."""
    model = ModelConfig(
        depth=2,
        width=64,
        num_heads=2,
        num_kv_heads=2,
        sequence_len=LENGTH,
        vocab_size=VOCAB,
        windows=(16, LENGTH),
    )
    optimizer = scaling.optimizer_for(
        model, tokens=10**6, reference_tokens=10**6, total_batch_size=2**15
    )
    job = Job(
        directory=directory,
        stage="pretrain",
        entry="nanochat_core.train.pretrain",
        fingerprint="0" * 12,
        config={
            "seed": 3,
            "numerics": scaling.numerics("fp32").tree(),
            "model": model.tree(),
            "optimizer": optimizer.tree(),
            "pretrain": {
                "num_steps": num_steps,
                "total_batch_size": ROWS_PER_STEP * LENGTH,
                "schedule": scaling.pretrain_schedule().tree(),
                "eval_tokens": 4 * LENGTH,
            },
        },
        inputs=inputs,
        resources=small_resources(eval_every_steps=40),
    )
    return ready(job)


def small_resources(*, eval_every_steps: int) -> Resources:
    """One thread, and checkpoints by steps alone, so that kills land between the same ones."""
    return one_thread(device_batch_size=4, save_every_steps=5, eval_every_steps=eval_every_steps)


def ready(job: Job) -> Job:
    """The job with its directories and its file, as a worker finds it."""
    job.output.mkdir(parents=True)
    job.checkpoints.mkdir()
    job.write()
    return job


def digests(job: Job) -> dict[str, str]:
    """sha256 of every file that the job made."""
    files = [path for path in sorted(job.output.rglob("*")) if path.is_file()]
    return {str(path.relative_to(job.output)): sha256(path) for path in files}


def reported(job: Job) -> dict[tuple[str, int], list[dict[str, float]]]:
    """(kind, step) -> what each attempt reported of it, clocks left out."""
    return values_in(job.events)


def values_in(*logs: Path) -> dict[tuple[str, int], list[dict[str, float]]]:
    """(kind, step) -> the values that logs of events have of it, clocks left out."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    # A job that was killed while it started has no such file.
    for event in (event for log in logs if log.exists() for event in read_events(log)):
        if event["kind"] in ("step", "eval"):
            values = {k: v for k, v in event["values"].items() if k not in CLOCKS}
            found.setdefault((event["kind"], event["step"]), []).append(values)
    return found


def find_torn(job: Job) -> list[str]:
    """Checkpoints that say they are whole and are not, decided by their files alone."""
    torn: list[str] = []
    for path in sorted(job.checkpoints.glob("step-*/COMMIT.json")):
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
            whole = bool(files) and all(
                (path.parent / name).stat().st_size == file["size"]
                and sha256(path.parent / name) == file["sha256"]
                for name, file in files.items()
            )
        except (OSError, ValueError, KeyError):
            whole = False
        if not whole:
            torn.append(path.parent.name)
    return torn


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
