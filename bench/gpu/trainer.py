"""Our training loop without a stage around it: no validation, no checkpoints, random rows.

As the peer's side of `pairs.py`: `trainer.py CASE`, the fields of bench/train.py's Case and
`threads` as JSON, held by the gate (bench/train_gate.py).
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch

from bench.our_train import make_resources, random_rows
from bench.train_gate import open_gate
from nanochat_core import scaling
from nanochat_core.config import RunConfig
from nanochat_core.model import gpt
from nanochat_core.model.attention import attention_backend, choose, choose_qk_kernel
from nanochat_core.model.gpt import GPT
from nanochat_core.model.matrices.gradient import choose_weight_kernel
from nanochat_core.model.shape import head_dim
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.hardware.gc_disabled import gc_disabled
from nanochat_core.train.loop.prefetch import prefetch
from nanochat_core.train.loop.step import micro_steps

SCHEDULE = {"lr_multiplier": 1e-3, "momentum": 0.95, "weight_decay": 0.1}


def main() -> None:
    """Train until the driver has enough."""
    case = json.loads(sys.argv[1])
    gate = open_gate(case["device"], "ours")
    # Sections of a profile, outside of what is compiled.
    gpt.softcap_loss = gate.wrap(gpt.softcap_loss, "loss")
    torch.Tensor.backward = gate.wrap(torch.Tensor.backward, "backward")
    Optimizer.step = gate.wrap(Optimizer.step, "optimizer")
    with gc_disabled():
        for number, _ in enumerate(train(case)):
            if number == 0:
                print(f"attention: {attention_backend()}", file=sys.stderr, flush=True)
            gate.after_step()


def train(case: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Train without an end; yield each step's loss, a scalar on the device, which may be late."""
    device = open_device(make_resources(case))
    run = make_run(case)
    numerics = dataclasses.replace(
        run.numerics, fp8_scales=case["fp8_scales"], fp8_sums=case["fp8_sums"]
    )
    model = make_model(dataclasses.replace(run, numerics=numerics), device)
    choose(case["attention"], device, model.dtype)
    choose_qk_kernel(case["qk_kernel"], device, head_dim(run.model))
    choose_weight_kernel(case["weight_kernel"], device, run.numerics.precision)
    optimizer = Optimizer(model, run.optimizer, precision=run.numerics.precision, world=ALONE)
    if case["compile"]:
        model.compile_passes(by_block=case["compile"] == "blocks", autotune=case["autotune"])
    rows = random_rows(case["sequence_len"], case["vocab_size"])
    count = case["rows"] * case["accumulate"]
    tokens_per_step = count * case["sequence_len"]

    def take(step: int) -> tuple[npt.NDArray[Any]]:
        return (rows.take(range(step * count, (step + 1) * count), axis=0, mode="wrap"),)

    for _, (tokens,) in prefetch(take, start=0, stop=sys.maxsize, device=device):
        for inputs, targets, last in micro_steps(
            model, tokens, None, device_batch_size=case["rows"]
        ):
            optimizer.backward(model.summed_loss(inputs, targets, 1 / tokens_per_step), last=last)
        loss = optimizer.start_reduce_scatter()
        optimizer.step(**SCHEDULE)
        yield loss


def make_run(case: dict[str, Any]) -> RunConfig:
    """Return the configuration of a case, with its width if it has one."""
    shape = {name: case[name] for name in ("precision", "sequence_len", "vocab_size")}
    run = scaling.run_for_depth(case["depth"], **shape)
    if case["width"] is None:
        return run
    heads = case["width"] // scaling.HEAD_DIM
    shape = {"width": case["width"], "num_heads": heads, "num_kv_heads": heads}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **shape))


def make_model(run: RunConfig, device: torch.device) -> GPT:
    """Return a model with initial weights, in training mode."""
    with torch.device("meta"):
        model = GPT(run.model, run.numerics)
    model.to_empty(device=device)
    model.init_weights(run.seed)
    return model


if __name__ == "__main__":
    main()
