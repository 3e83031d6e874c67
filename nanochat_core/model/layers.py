"""What the transformer is made of: matrices, tables, norms and rotary positions.

Shapes: B rows, T tokens, P positions, D head dim.
"""

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat_core.config import NumericsConfig
from nanochat_core.model.fp8 import Quantised, is_eligible
from nanochat_core.model.fp8 import linear as fp8_linear
from nanochat_core.runtime.hardware.device import compute_dtype

SORTED_TABLE_GRADIENT = True  # on GPUs; a CPU has no use for it (bench of 2048 tokens: 2 ms of 2 s)

Rotary: TypeAlias = tuple[Tensor, Tensor]  # cos, sin: (B or 1, T, 1, D/2)


class Linear(nn.Module):
    """A matrix without bias, in fp32, cast to the dtype of what it multiplies.

    Training in precision fp8 sets `quantised`; whoever evaluates sees the matrix as it is.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.quantised: Quantised | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., num_in) -> (..., num_out)."""
        quantised = self.in_training()
        if quantised is not None:
            return fp8_linear(x, self.weight, quantised)
        return F.linear(x, self.weight.to(x.dtype))

    def in_training(self) -> Quantised | None:
        """`quantised` where a gradient will be wanted, else None."""
        return self.quantised if self.training and torch.is_grad_enabled() else None


class Embedding(nn.Module):
    """A table of vectors, kept in the compute dtype."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (...) -> (..., width)."""
        if tokens.device.type == "cuda" and SORTED_TABLE_GRADIENT:
            return SortedLookup.apply(tokens, self.weight)
        return F.embedding(tokens, self.weight)


class SortedLookup(torch.autograd.Function):
    """F.embedding whose gradient adds up the tokens of a row in the order of a sort.

    The same bits every time, and no row is fought over by atomic additions, into which torch's
    compiler would turn it otherwise. No GPU has run it yet.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        """tokens int64 (...), table (V, C) -> (..., C)."""
        ctx.save_for_backward(tokens)
        ctx.num_rows = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        """The table's gradient."""
        return None, table_gradient(grad_outputs[0], ctx.saved_tensors[0], ctx.num_rows)


@torch.library.custom_op("nanochat_flows::table_gradient", mutates_args=())
def table_gradient(grad: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """Sum grad (..., C) into the rows (num_rows, C) of its tokens; opaque to torch's compiler."""
    return torch.ops.aten.embedding_dense_backward(grad, tokens, num_rows, -1, False)


@table_gradient.register_fake
def _(grad: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.size(-1))


def refresh_fp8(model: nn.Module) -> None:
    """Quantise the eligible matrices that were written to since: once after each step.

    Raises ConfigError where fp8 products cannot run.
    """
    for module in model.modules():
        if isinstance(module, Linear) and is_eligible(module.weight):
            if module.quantised is None:
                module.quantised = Quantised(module.weight)
            module.quantised.refresh()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension; computed in fp32."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary positions on x (B, T, heads, D): channel j turns with channel j + D/2, clockwise."""
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def rotary_table(
    num_positions: int, head_dim: int, numerics: NumericsConfig, device: torch.device
) -> Rotary:
    """cos and sin (num_positions, 1, head_dim / 2) in the compute dtype."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (numerics.rotary_base ** (channels / head_dim))
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    dtype = compute_dtype(numerics.precision)
    rounded = torch.bfloat16 if numerics.rotary_precision == "bf16" else dtype
    return angles.cos().to(rounded).to(dtype), angles.sin().to(rounded).to(dtype)
