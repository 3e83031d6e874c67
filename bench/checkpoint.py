"""What saving costs a training loop: `python bench/checkpoint.py [--depth 4]`.

Steps on random ids with the checkpointer's own code: some with nothing beside them, then a save and
the steps while it is written, in turn. A save costs the time in which the loop stands (it copies
the state) and what the steps beside the writing take longer than usual; reported as a share of the
time between two saves. On a busy machine believe `cpu_share`.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nanochat_core import scaling
from nanochat_core.engine.speed import wait_for_gpu
from nanochat_core.job import Job, Resources
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.hardware.gc_disabled import gc_disabled
from nanochat_core.runtime.progress import Progress
from nanochat_core.train.loop.checkpoint import newest_step
from nanochat_core.train.loop.checkpointer import Checkpointer
from nanochat_core.train.loop.metrics import TrainMetrics, pace_of


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--sequence-len", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between saves")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--saves", type=int, default=5, help="among the steps; 2 more beside none")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(options, Path(directory))
    for name, value in found.items():
        print(f"{name:28}{value}")
    print(json.dumps(found))


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Steps with and without saves, in blocks that take turns."""
    device = torch.device(options.device)
    config = scaling.model_for_depth(
        options.depth, sequence_len=options.sequence_len, vocab_size=options.vocab_size
    )
    model = GPT(config, scaling.numerics(options.precision)).to(device)
    model.init_weights(1)
    rates = scaling.run_for_depth(12).optimizer
    optimizer = Optimizer(model, rates, precision=options.precision, world=ALONE)
    job = make_job(directory, options)
    progress = Progress(job.events)
    tokens = torch.randint(
        config.vocab_size, (options.rows, options.sequence_len + 1), device=device
    )
    pace = pace_of(job, model, tokens_per_step=tokens.numel(), device=device, world=ALONE)
    metrics = TrainMetrics(progress, pace, late=device.type == "cuda")
    checkpointer = Checkpointer(job, optimizer, ALONE, progress, metrics)
    saves: list[tuple[float, float]] = []  # seconds the loop stood, seconds until it was committed

    def step(done: int) -> float:
        began = time.perf_counter()
        loss = model.summed_loss(tokens[:, :-1], tokens[:, 1:], 1 / tokens[:, 1:].numel())
        optimizer.backward(loss, last=True)
        metrics.record(done, optimizer.start_reduce_scatter())
        optimizer.step(lr_multiplier=1e-3, momentum=0.9, weight_decay=0.0)
        metrics.flush()
        wait_for_gpu()  # or the time would be that of starting kernels
        return time.perf_counter() - began

    def save(done: int) -> float:
        began = time.perf_counter()
        if checkpointer.is_due(done):
            checkpointer.save(done, {})
        return time.perf_counter() - began

    with gc_disabled():
        for done in range(1, 4):
            step(done)
        first = save(3)
        checkpointer.close()
        alone: list[float] = []  # CPU seconds of a whole save with nothing beside it
        for done in range(4, 6):
            cpu = time.process_time()
            save(done)
            checkpointer.close()
            alone.append(time.process_time() - cpu)
        quiet, beside = [], []
        done = 6
        for _ in range(options.saves):
            # A block: some steps with nothing beside them, a save, the steps while it is written.
            for _ in range(options.steps // options.saves):
                done += 1
                quiet.append(step(done))
            stood, began = save(done), time.perf_counter()
            saved = done
            while newest_step(job.checkpoints) != saved:
                done += 1
                beside.append(step(done))
            saves.append((stood, time.perf_counter() - began))
            checkpointer.close()
    usual = statistics.median(quiet)
    slowed = sum(beside) - len(beside) * usual
    stall = statistics.mean(stood for stood, _ in saves) + slowed / len(saves)
    size = sum(path.stat().st_size for path in job.checkpoints.glob("step-*/tensors-*"))
    return {
        **vars(options),
        "parameters": sum(p.numel() for p in model.parameters()),
        "megabytes": round(size / 1e6 / len(list(job.checkpoints.glob("step-*")))),
        "step_seconds": round(usual, 4),
        "pinned_megabytes": round(pinned_bytes(device) / 1e6),
        "first_save_stands_seconds": round(first, 4),
        "later_saves_stand_seconds": round(statistics.mean(stood for stood, _ in saves), 4),
        "written_after_seconds": round(statistics.mean(took for _, took in saves), 2),
        "steps_beside_a_save": len(beside) / len(saves),
        "slowed_seconds": round(slowed / len(saves), 4),
        "share": round(stall / options.every, 5),
        # Free of what else runs on the machine: no more can be taken from a loop that uses one CPU.
        "cpu_seconds_of_a_save": round(statistics.median(alone), 4),
        "cpu_share": round(statistics.median(alone) / options.every, 5),
    }


def pinned_bytes(device: torch.device) -> int:
    """Return the host memory that is pinned for copies from a GPU."""
    return torch.cuda.host_memory_stats()["allocated_bytes.peak"] if device.type == "cuda" else 0


def make_job(directory: Path, options: argparse.Namespace) -> Job:
    """A job that saves when it is asked to."""
    job = Job(
        directory=directory,
        stage="pretrain",
        entry="nanochat_core.train.pretrain",
        fingerprint="bench",
        config={},
        inputs={},
        resources=Resources(
            device=options.device,
            threads=options.threads,
            device_batch_size=options.rows,
            save_every_seconds=0.0,  # whenever the checkpointer is asked
            eval_every_steps=0,
            dollars_per_hour=0.0,
        ),
    )
    job.checkpoints.mkdir()
    return job


if __name__ == "__main__":
    main()
