"""Small models whose every weight is random, so that each part of them matters."""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch

from nanochat_core.config import ModelConfig
from nanochat_core.engine.runner import Capacity
from nanochat_core.engine.runners.choose import page_groups
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import numerics


def shape_of(*windows: int, **shape: Any) -> ModelConfig:
    """Return the shape of a layer for each window: width 64, four heads that share two keys, 300
    tokens, and a context as long as the last window, unless `shape` says otherwise."""
    least = {"width": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300}
    fields = {"depth": len(windows), "sequence_len": windows[-1], **least, **shape}
    return ModelConfig(windows=windows, **fields)


def random_gpt(*windows: int, seed: int = 0, **shape: Any) -> GPT:
    """Make a model of a layer for each window: width 32, two heads, a byte tokenizer's vocabulary,
    unless `shape` says otherwise."""
    least = {"width": 32, "num_heads": 2, "vocab_size": 265}
    return randomise(GPT(shape_of(*windows, **least | shape), numerics("fp32")), seed)


def randomise(
    model: GPT, seed: int = 0, std: float | Callable[[str, torch.nn.Parameter], float] = 0.3
) -> GPT:
    """Draw all weights from a normal distribution; `std` may depend on name and parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = std(name, parameter) if callable(std) else std
            parameter.normal_(std=own, generator=generator)
    return model.eval()


def make_writer(model: GPT, *chains: Sequence[int]) -> None:
    """Give each token of a chain the next one as its successor, whatever came before.

    Attention and MLPs are silenced, and each token has a code of its own.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(model.config.vocab_size, model.config.width, generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.resid_lambdas.fill_(1.0)
        model.transformer.wte.weight[: len(codes)] = codes
        for token, successor in chain.from_iterable(map(pairwise, chains)):
            model.lm_head.weight[successor] = 0.3 * codes[token]


def capacity_of(
    model: GPT,
    *,
    num_slots: int,
    page_size: int = 4,
    max_len: int = 64,
    num_pages: int | None = None,
) -> Capacity:
    """Return a runner's capacity; by default every slot can have the pages of `max_len` tokens."""
    num_pages = num_pages or 1 + num_slots * -(-max_len // page_size)
    groups = page_groups(model.config, num_pages=num_pages)
    return Capacity(groups=groups, page_size=page_size, num_slots=num_slots, max_len=max_len)
