"""Our side of `bench/train.py`: stage `pretrain` as it is, on random rows, held by the gate.

Run by the driver: `our_train.py CASE DIRECTORY` with the case as JSON.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_gate import Gate, open_gate

from nanochat_core import scaling
from nanochat_core.data import row_files
from nanochat_core.job import Job, Resources
from nanochat_core.model import gpt
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.progress import Progress
from nanochat_core.train import pretrain
from nanochat_core.train.loop.checkpointer import Checkpointer

NUM_ROWS = 256
NEVER = 1e9  # seconds


def main() -> None:
    """Train until the driver has enough."""
    case, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    gate = open_gate(case["device"], "ours")
    instrument(gate)
    pretrain.run(make_job(case, directory))


def make_job(case: dict[str, Any], directory: Path) -> Job:
    """A pretraining job of the case's shape that never comes to its end."""
    run = scaling.run_for_depth(
        case["depth"],
        precision=case["precision"],
        sequence_len=case["sequence_len"],
        vocab_size=case["vocab_size"],
    )
    batch = case["rows"] * case["accumulate"] * case["sequence_len"]
    section = dataclasses.replace(
        run.pretrain, num_steps=10**6, total_batch_size=batch, eval_tokens=case["sequence_len"]
    )
    job = Job(
        directory=directory,
        stage="pretrain",
        entry="nanochat_core.train.pretrain",
        fingerprint="bench",
        config={
            "seed": run.seed,
            "numerics": run.numerics.tree(),
            "model": run.model.tree(),
            "optimizer": run.optimizer.tree(),
            "pretrain": section.tree(),
        },
        inputs={"rows": directory / "rows", "tokenizer": directory},
        resources=Resources(
            device=case["device"],
            threads=case["threads"],
            device_batch_size=case["rows"],
            save_every_seconds=NEVER,
            eval_every_steps=0,
            dollars_per_hour=0.0,
            retry_smaller_batch=False,
            attention="sdpa" if case["attention"] == "sdpa" else "auto",
            compile=case["compile"],
        ),
    )
    job.output.mkdir(parents=True)
    job.checkpoints.mkdir()
    write_random_rows(directory / "rows", case["sequence_len"], case["vocab_size"])
    return job


def write_random_rows(directory: Path, sequence_len: int, vocab_size: int) -> None:
    """Both splits of a rows artifact, every id drawn alike."""
    directory.mkdir()
    ids = np.random.default_rng(1).integers(vocab_size, size=(NUM_ROWS, sequence_len + 1))
    for split in row_files.SPLITS:
        ids.astype("<u2").tofile(directory / f"{split}.rows")
    row_files.write_index(
        directory,
        {
            "sequence_len": sequence_len,
            "dtype": "uint16",
            "vocab_size": vocab_size,
            "tokenizer": RandomTokens.digest(),
            "policy": "default",
            "num_train": NUM_ROWS,
            "num_val": NUM_ROWS,
            "tokens": ids.size,
            "waste": 0.0,
        },
    )
    RandomTokens.vocab_size = vocab_size


class RandomTokens:
    """Stands for the tokenizer of random ids: one byte a token."""

    vocab_size = 0

    @classmethod
    def load(cls, directory: Path) -> "RandomTokens":
        """There is nothing to load."""
        return cls()

    @staticmethod
    def digest() -> str:
        """What the rows say they were made with."""
        return "random"

    def token_bytes(self) -> np.ndarray[Any, Any]:
        """(V,) int32."""
        return np.ones(self.vocab_size, dtype=np.int32)


def instrument(gate: Gate) -> None:
    """Name the sections of our loop, and let it save when the driver asks."""
    pretrain.Tokenizer = RandomTokens  # pyright: ignore[reportAttributeAccessIssue]
    report, feed, loss, is_due = (
        Progress.step,
        pretrain.prefetch,
        gpt.softcap_loss,
        Checkpointer._is_due,
    )

    def step_then_wait(self: Progress, step: int, **values: float) -> None:
        report(self, step, **values)
        gate.after_step()

    def timed_feed(*arguments: Any, **named: Any) -> Iterator[Any]:
        rows = feed(*arguments, **named)
        following = gate.wrap(lambda: next(rows), "data")
        while True:
            yield following()

    def marked_loss(hidden: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        hidden.register_hook(lambda grad: gate.switch("backward") and None)
        return loss(hidden, *arguments, **named)

    Progress.step = step_then_wait
    pretrain.prefetch = timed_feed
    gpt.softcap_loss = gate.wrap(marked_loss, "loss")
    gpt.GPT.summed_loss = gate.wrap(gpt.GPT.summed_loss, "forward")
    torch.Tensor.backward = gate.wrap(torch.Tensor.backward, "loss")
    Optimizer.step = gate.wrap(Optimizer.step, "optimizer")
    Checkpointer.maybe_save = gate.wrap(Checkpointer.maybe_save, "checkpoint")
    Checkpointer._is_due = lambda self, done: gate.take_save() or is_due(self, done)


if __name__ == "__main__":
    main()
