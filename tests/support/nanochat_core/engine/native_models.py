"""Small models of every era, and a native runner whose slots have all the pages they could want."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from nanochat_core.engine.native import build
from nanochat_core.engine.native.runner import NativeRunner
from nanochat_core.engine.native.weights import PAGE_SIZE, Precision
from nanochat_core.engine.runner import Chunk
from nanochat_core.eras import HEAD, numerics, of_era
from nanochat_core.model.gpt import GPT
from tests.support.nanochat_core.random_gpt import capacity_of, randomise, shape_of

NO_KERNELS = build.unable_here()
needs_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
VOCAB = 100
LENGTH = 96


def make_gpt(shape: Mapping[str, Any] = {}, *, era: str = HEAD, seed: int = 0) -> GPT:
    """Make a model of four layers whose every weight matters. Its windows are shorter than LENGTH
    where the era has short ones, unless the shape has others."""
    fields = {"vocab_size": VOCAB, **shape}
    windows = fields.pop("windows", None)
    config = shape_of(*[LENGTH] * fields.get("depth", 4), **fields)
    config = of_era(config, era, pattern="L")
    if config.residual_scalars:  # an era with short windows; theirs are longer than these tests
        short = [21 if layer % 2 == 0 else LENGTH for layer in range(config.depth - 1)]
        config = dataclasses.replace(config, windows=windows or (*short, LENGTH))
    model = GPT(config, numerics("fp32", era=era))
    return randomise(model, seed, lambda _, p: 1.5 * p.shape[-1] ** -0.5 if p.ndim > 1 else 0.5)


def make_runner(
    model: GPT,
    *,
    precision: Precision = "fp32",
    num_slots: int = 4,
    num_threads: int = 2,
) -> NativeRunner:
    """Every slot has the pages of LENGTH tokens."""
    pages = -(-LENGTH // PAGE_SIZE)
    runner = NativeRunner(
        model,
        precision=precision,
        capacity=capacity_of(model, num_slots=num_slots, page_size=PAGE_SIZE, max_len=LENGTH),
        stop_tokens=(),
        num_threads=num_threads,
    )
    for group, slot in itertools.product(range(len(runner.groups)), range(num_slots)):
        runner.set_table(group, slot, 0, range(1 + slot * pages, 1 + (slot + 1) * pages))
    return runner


def make_tokens(length: int, seed: int) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def chunk(slot: int, tokens: list[int], start: int, end: int, *, wants: bool = True) -> Chunk:
    return Chunk(
        slot=slot,
        start=start,
        prev_token=tokens[start - 1] if start else -1,
        tokens=tokens[start:end],
        wants_logits=wants,
    )


def read(runner: NativeRunner, slot: int, tokens: list[int], *cuts: int) -> Tensor:
    """Logits (pieces, V) of a slot that reads tokens in pieces that end at the cuts."""
    ends = (*cuts, len(tokens))
    starts = (0, *cuts)
    pieces = [chunk(slot, tokens, start, end) for start, end in zip(starts, ends, strict=True)]
    return torch.cat([runner.prefill([piece]) for piece in pieces])
