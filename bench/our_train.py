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

from bench.train_gate import Gate, open_gate
from nanochat_core import scaling
from nanochat_core.data import row_files
from nanochat_core.job import Job, Resources
from nanochat_core.model import gpt
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
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


def make_job(
    case: dict[str, Any], directory: Path, *, num_steps: int = 10**6, **resources: Any
) -> Job:
    """Return a pretraining job of the case's shape on random rows, with its inputs written.

    case: the fields of bench/train.py's Case, and `threads`. resources: fields to replace.
    """
    run = scaling.run_for_depth(
        case["depth"],
        precision=case["precision"],
        sequence_len=case["sequence_len"],
        vocab_size=case["vocab_size"],
    )
    batch = case["rows"] * case["accumulate"] * case["sequence_len"]
    section = dataclasses.replace(
        run.pretrain, num_steps=num_steps, total_batch_size=batch, eval_tokens=case["sequence_len"]
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
        inputs={"rows": directory / "rows", "tokenizer": directory / "tokenizer"},
        resources=dataclasses.replace(make_resources(case), **resources),
    )
    job.output.mkdir(parents=True)
    job.checkpoints.mkdir()
    write_inputs(directory, case["sequence_len"], case["vocab_size"])
    return job


def make_resources(case: dict[str, Any]) -> Resources:
    """Return the placement of the case: nothing is saved but on request."""
    return Resources(
        device=case["device"],
        threads=case["threads"],
        device_batch_size=case["rows"],
        save_every_seconds=NEVER,
        eval_every_steps=0,
        dollars_per_hour=0.0,
        retry_smaller_batch=False,
        attention=case["attention"],
        compile=case["compile"],
    )


def write_inputs(directory: Path, sequence_len: int, vocab_size: int) -> None:
    """Write a tokenizer and both splits of a rows artifact, each id of its vocabulary alike often.

    vocab_size: 265 (the bytes and the special tokens) at least.
    """
    tokenizer = make_tokenizer(vocab_size)
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "tokenizer")
    rows = directory / "rows"
    rows.mkdir()
    ids = random_rows(sequence_len, vocab_size)
    for split in row_files.SPLITS:
        ids.tofile(rows / f"{split}.rows")
    row_files.write_index(
        rows,
        {
            "sequence_len": sequence_len,
            "dtype": "uint16",
            "vocab_size": vocab_size,
            "tokenizer": tokenizer.digest(),
            "policy": "default",
            "num_train": NUM_ROWS,
            "num_val": NUM_ROWS,
            "tokens": ids.size,
            "waste": 0.0,
        },
    )


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of the bytes, as many pairs of them as wanted, and the special tokens."""
    ranks = {bytes([i]): i for i in range(256)}
    pairs = vocab_size - 256 - len(SPECIAL_TOKENS)
    return Tokenizer(ranks | {bytes(divmod(i, 256)): 256 + i for i in range(pairs)})


def random_rows(sequence_len: int, vocab_size: int) -> np.ndarray[Any, Any]:
    """Return (NUM_ROWS, sequence_len + 1) ids, little-endian u16, always the same."""
    ids = np.random.default_rng(1).integers(vocab_size, size=(NUM_ROWS, sequence_len + 1))
    return ids.astype("<u2")


def instrument(gate: Gate) -> None:
    """Name the sections of our loop, and let it save when the driver asks."""
    report, feed, loss, is_due = (
        Progress.step,
        pretrain.prefetch,
        gpt.softcap_loss,
        Checkpointer.is_due,
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
    Checkpointer.save = gate.wrap(Checkpointer.save, "checkpoint")
    Checkpointer.is_due = gate.wrap(
        lambda self, done: gate.take_save() | is_due(self, done), "checkpoint"
    )


if __name__ == "__main__":
    main()
