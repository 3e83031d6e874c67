"""Lookups on a CPU whose backward pass adds the table's gradient to the optimizer's sum."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model.gradient_sum import GradientSum
from nanochat_core.model.layers import Embedding


class AddingLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, proxy: Tensor, into: GradientSum):
        ctx.save_for_backward(tokens)
        ctx.into = into
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        total, holds = ctx.into.take()
        if not holds:
            total.zero_()
        rows = grad_outputs[0].flatten(0, -2).float()
        total.index_add_(0, ctx.saved_tensors[0].flatten(), rows)
        return None, None, torch.zeros(()), None


def lookup(table: Embedding, tokens: Tensor) -> Tensor:
    into = table.gradient_sum
    if into is None:
        return F.embedding(tokens, table.weight)
    return AddingLookup.apply(tokens, table.weight.detach(), into.proxy, into)


@contextlib.contextmanager
def adding_lookups() -> Iterator[None]:
    """Within it, all models look tokens up so."""
    with mock.patch.object(Embedding, "forward", lookup):
        yield
