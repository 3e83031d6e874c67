"""Whether each way of training and answering runs at all, for a few steps of a small model.

    python -m bench.gpu.smoke --device cuda --at-once 5

Stage `pretrain` with each attention backend in bf16 and fp8; an RL update in fp8 on answers of odd
lengths; answers with deterministic kernels alone. Each in a process of its own.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu.report import needs_gpu, result, say
from bench.gpu.trainer import SCHEDULE, make_model
from bench.our_train import make_job
from bench.train import Case
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.choose import open_runner
from nanochat_core.engine.speed import make_endless, time_answers
from nanochat_core.errors import ConfigError
from nanochat_core.model.attention import attention_backend, choose
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import run_for_depth
from nanochat_core.train import pretrain
from nanochat_core.train.policy import Rollout, policy_loss

BACKENDS, PRECISIONS = ("flex", "cudnn", "varlen", "sdpa"), ("bf16", "fp8")
FOR_GPUS = ("flex", "cudnn", "varlen")
STEPS = 3  # one on a CPU
CLOSE = 0.02  # relative, of the losses of two backends
Values = dict[str, Any]


def main() -> None:
    """Run them all; exit 1 if one fails, or the losses of two backends differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    device = options.device
    smokes: dict[str, Callable[[], Values]] = {
        f"pretrain {backend} {precision}": partial(pretraining, device, backend, precision)
        for precision in PRECISIONS
        for backend in BACKENDS
    }
    smokes["rl fp8, odd lengths"] = partial(reinforcing, device)
    smokes["answers, strict"] = partial(answering, device)
    if device == "cpu":
        found = {name: attempt(smoke) for name, smoke in smokes.items()}
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.at_once, context, max_tasks_per_child=1) as pool:
            futures = {name: pool.submit(attempt, smoke) for name, smoke in smokes.items()}
            found = {name: future.result() for name, future in futures.items()}
    for name, values in found.items():
        report(name, values, on_gpu=device == "cuda")
    failures = [name for name, values in found.items() if "failed" in values]
    if device == "cpu":
        failures = [name for name in failures if not refuses_cpu(name, found[name])]
    differ = [p for p in PRECISIONS if not agree(found, p)]
    for precision in differ:
        say(f"losses of the attention backends differ in {precision}")
    sys.exit(1 if failures or differ else 0)


def attempt(smoke: Callable[[], Values]) -> Values:
    """Return a smoke's values; {"failed", "type"} if it raised."""
    try:
        return smoke()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others run too
        traceback.print_exc()
        return {"failed": str(error).strip().partition("\n")[0], "type": type(error).__name__}


def report(name: str, values: Values, *, on_gpu: bool) -> None:
    """Report one smoke."""
    if not on_gpu and refuses_cpu(name, values):
        needs_gpu(name)
        return
    result(name, **values)
    say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in values.items()))


def refuses_cpu(name: str, values: Values) -> bool:
    """Return whether a backend that is for GPUs alone said so."""
    is_for_gpus = any(backend in name for backend in FOR_GPUS)
    return is_for_gpus and values.get("type") == ConfigError.__name__


def agree(found: dict[str, Values], precision: str) -> bool:
    """Return whether the backends that ran came to the same loss."""
    values = [of for name, of in found.items() if name.endswith(precision)]
    losses = [of["bits_per_byte"] for of in values if "bits_per_byte" in of]
    return bool(losses) and max(losses) - min(losses) <= CLOSE * min(losses)


def pretraining(device: str, backend: str, precision: str) -> Values:
    """Run stage `pretrain` from its first step to its model."""
    on_gpu = device == "cuda"
    case = Case(
        name="smoke",
        depth=4 if on_gpu else 2,
        device=device,
        precision=precision,
        rows=8 if on_gpu else 1,
        accumulate=2,
        sequence_len=2048 if on_gpu else 64,
        vocab_size=32768 if on_gpu else 512,
        attention=backend,
        compile=on_gpu,
    )
    with tempfile.TemporaryDirectory() as directory:
        job = make_job(
            asdict(case) | {"threads": 1}, Path(directory), num_steps=STEPS if on_gpu else 1
        )
        metrics = pretrain.run(job)
    return {"bits_per_byte": round(metrics["val_bpb"], 4), "attention": metrics["attention"]}


def reinforcing(device: str) -> Values:
    """Update a model on answers whose lengths are odd, in fp8."""
    run = run_for_depth(2, precision="fp8", sequence_len=256, vocab_size=512)
    model = make_model(run, torch.device(device))
    choose("auto", torch.device(device), model.dtype)
    optimizer = Optimizer(model, run.optimizer, precision="fp8", world=ALONE)
    rng = random.Random(1)
    losses: list[float] = []
    for lengths in ((7, 37), (11, 101)):
        rollouts = [
            Rollout(
                prompt=rng.choices(range(256), k=5),
                answer=rng.choices(range(256), k=length),
                mask=[1] * length,
                reward=float(sign > 0),
                advantage=sign,
            )
            for length, sign in zip(lengths, (0.5, -0.5), strict=True)
        ]
        num_tokens = torch.tensor(float(sum(lengths)), device=device)
        model.train()
        for i in range(2):
            loss = policy_loss(model, rollouts, [i], None, num_tokens)
            optimizer.backward(loss, last=i == 1)
        losses.append(float(optimizer.start_reduce_scatter()))
        optimizer.step(**SCHEDULE)
    assert all(abs(loss) < 100 for loss in losses), losses
    return {"losses": [round(loss, 4) for loss in losses], "attention": attention_backend()}


def answering(device: str) -> Values:
    """Answer with deterministic kernels alone, by the fastest runner of the device."""
    torch.use_deterministic_algorithms(True)
    precision = "bf16" if device == "cuda" else "fp32"
    run = run_for_depth(2, precision=precision, sequence_len=256, vocab_size=512)
    model = make_model(run, torch.device(device))
    name = "cuda graphs" if device == "cuda" else "torch"
    runner = open_runner(model.eval(), stop_tokens=(), runner=name, num_slots=2, max_len=64)
    scheduler = make_endless(runner, context=64)
    prompt = list(range(20))
    time_answers(scheduler, prompt, 2, 30, seed=1, params=SamplingParams(top_k=50))
    return {"runner": name, "tokens": 60}


if __name__ == "__main__":
    main()
