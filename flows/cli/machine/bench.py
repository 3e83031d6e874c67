"""`nanochat bench`: how fast a model answers on this machine."""

import dataclasses
import json
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from flows.cli.models import open_named_model
from flows.cli.options import GpusFlag, Positive, StoreOptions, device_of
from flows.cli.output import print_lines, print_note
from flows.render.table import Table, numbers
from flows.render.text import size
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # torch is slow to import, and every command imports this module
    from nanochat_core.engine.runners.choose import Choice
    from nanochat_core.engine.speed import Speed
    from nanochat_core.model.gpt import GPT

_SIZES = (1, 2, 4, 8, 16, 32)
_COLUMNS = numbers("batch", "first token", "step", "tokens/s", "a step reads", "of the bandwidth")


def bench(
    model: Annotated[str | None, Parameter(name="REF")] = None,
    /,
    *,
    depth: Positive | None = None,
    batch_sizes: Annotated[tuple[Positive, ...], Parameter(consume_multiple=True)] = _SIZES,
    prompt_len: Positive = 64,
    tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 64,
    rounds: Positive = 3,
    precision: str = "model",
    runner: str | None = None,
    threads: Positive | None = None,
    gpus: GpusFlag = None,
    where: StoreOptions = StoreOptions(),
) -> None:
    """Measure how fast a model answers here, for each batch size.

    Shows the time to the first token, tokens per second, and the share of the memory's bandwidth.

    A batch is so many answers to one prompt; none of them ends early.

    The share is of what reading measures here; a step reads matrices, keys and values.

    The last line is JSON.

    Args:
        model: A profile or a tag, a stage of one (sft@tiny), a fingerprint, a model directory or
            hf://OWNER/NAME.
        depth: Random weights of this many layers, in place of a model.
        batch_sizes: Answers at a time, one row of the table each.
        prompt_len: Tokens of the prompt.
        tokens: Tokens of an answer, at least 2.
        rounds: Medians are of so many.
        precision: Precision of the weights: model (its own), fp32, bf16, int8 or auto.
        runner: native, torch, cuda graphs or triton; default the fastest there is.
        threads: Of the CPU; default torch's choice.
    """
    most = os.cpu_count() or 1
    if threads is not None and threads > most:
        raise ConfigError(f"--threads is {threads}, this machine has {most}")
    if (model is None) == (depth is None):  # exactly one of the two is needed
        raise ConfigError(
            "bench needs a model or --depth, and not both",
            hint="nanochat bench sft@tiny, or nanochat bench --depth 12",
        )
    # Options that need no model are checked by now: opening a model may download it for minutes.
    device = device_of(gpus)
    directory = None if model is None else open_named_model(where, model)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    gpt = _load(directory, depth, device)
    if prompt_len + tokens > gpt.config.sequence_len:
        raise ConfigError(
            f"{prompt_len} tokens of prompt and {tokens} of answer are more than the model's "
            f"{gpt.config.sequence_len}",
            hint="give a smaller --prompt-len or --tokens",
        )
    choice, bandwidth, speeds = _measure(
        gpt, batch_sizes, prompt_len, tokens, rounds, precision, runner=runner, threads=threads
    )
    rows = [
        (
            str(speed.batch_size),
            f"{speed.first_token * 1e3:,.1f} ms",
            f"{speed.step * 1e3:,.2f} ms",
            f"{speed.tokens_per_second:,.0f}",
            size(speed.bytes_per_step),
            f"{speed.bandwidth_share:.0%}",
        )
        for speed in speeds
    ]
    reads = f"reading gets {size(round(bandwidth))}/s out of this machine's memory"
    print_lines([Table(columns=_COLUMNS, rows=rows), reads])
    tree = {
        "bench": "infer",
        "model": model or f"depth {depth}, random weights",
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "prompt_tokens": prompt_len,
        "answer_tokens": tokens,
        "bandwidth": bandwidth,
        "choice": dataclasses.asdict(choice),
        "speeds": [dataclasses.asdict(speed) for speed in speeds],
    }
    sys.stdout.write(json.dumps(tree) + "\n")


def _load(directory: Path | None, depth: int | None, device: str) -> "GPT":
    """Return the model in `directory`, or one of `depth` layers with random weights."""
    import torch

    from nanochat_core.model.checkpoint import load_model
    from nanochat_core.model.gpt import GPT
    from nanochat_core.scaling import model_for_depth, numerics

    if directory is not None:
        return load_model(directory, torch.device(device))
    assert depth is not None
    # On the meta device no memory is written: the weights are drawn once, on their own device.
    with torch.device("meta"):
        gpt = GPT(model_for_depth(depth), numerics("bf16" if device == "cuda" else "fp32"))
    gpt.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.normal_(std=0.02, generator=generator)
    return gpt.eval()


def _measure(
    gpt: "GPT",
    batch_sizes: tuple[int, ...],
    prompt_len: int,
    tokens: int,
    rounds: int,
    precision: str,
    **options: Any,
) -> "tuple[Choice, float, list[Speed]]":
    """Return the chosen runner, the bandwidth in bytes per second, and a row per batch size."""
    from nanochat_core.engine.runners.choose import open_runner
    from nanochat_core.engine.speed import (
        bytes_per_step,
        make_endless,
        measure_speed,
        read_bandwidth,
    )

    chosen: list[Choice] = []
    scheduler = open_runner(
        gpt,
        stop_tokens=(),  # no token calls a tool or ends an answer: all have the same length
        precision=precision,
        num_slots=max(batch_sizes),
        max_len=prompt_len + tokens,
        on_choice=chosen.append,
        **options,
    )
    scheduler, choice = make_endless(scheduler, context=prompt_len + tokens), chosen[0]
    print_lines([str(choice)])
    # Random tokens: the speed does not depend on the text, and no tokenizer is needed.
    rng = random.Random(1)
    prompt = [rng.randrange(gpt.config.vocab_size) for _ in range(prompt_len)]
    bandwidth = read_bandwidth(gpt.lm_head.weight.device, threads=choice.threads)
    # Mean length of the KV cache: it grows by one key and value per token of the answer.
    length = prompt_len + tokens // 2
    speeds: list[Speed] = []
    for rows in batch_sizes:
        print_note(f"measuring {rows} at a time")
        read = bytes_per_step(gpt, choice.runner, choice.precision, rows=rows, length=length)
        speed = measure_speed(
            scheduler,
            batch_size=rows,
            prompt=prompt,
            num_tokens=tokens,
            bytes_per_step=read,
            bandwidth=bandwidth,
            rounds=rounds,
        )
        speeds.append(speed)
    return choice, bandwidth, speeds
