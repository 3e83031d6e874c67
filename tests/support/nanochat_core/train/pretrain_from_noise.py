"""Pretraining as a stage's entry, with no initial weight zero: test_recipe_losses.py says why.

Worker processes import it by name, so that all of them begin with the same weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.train import pretrain


def run(job: Job) -> dict[str, Any]:
    with noise():
        return pretrain.run(job)


@contextmanager
def noise() -> Iterator[None]:
    init_weights = GPT.init_weights

    @torch.no_grad()
    def with_noise(self: GPT, seed: int) -> None:
        init_weights(self, seed)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "c_proj" in name or "smear_lambda" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT, "init_weights", with_noise)
        yield
