"""The layers of the transformer: linear maps, embedding tables, norms and rotary positions.

Shapes: B rows, T tokens, P positions, D head dim.
"""

from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat_core.config import NumericsConfig
from nanochat_core.model.fp8 import Quantised, is_eligible
from nanochat_core.model.fp8 import linears as fp8_linears
from nanochat_core.model.gradient_sum import Weighted
from nanochat_core.model.native import kernels, rows
from nanochat_core.runtime.hardware.device import compute_dtype

SORTED_TABLE_GRADIENT = True  # on GPUs; no gain on a CPU (bench of 2048 tokens: 2 ms of 2 s)

Rotary: TypeAlias = tuple[Tensor, Tensor]  # cos, sin: (B or 1, T, 1, D/2)


class LateModule(nn.Module):
    """A module that can be constructed under `torch.device("meta")` and allocated later."""

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Allocate all parameters, without initial values."""
        # Module's own calls `empty_like`, which for a meta tensor imports sympy: 0.8 CPU seconds.
        return self._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), recurse)


class Linear(Weighted):
    """A linear map without bias: an fp32 matrix, cast to the dtype of its input.

    Training in precision fp8 sets `quantised`; evaluation uses the matrix itself.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.quantised: Quantised | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., num_in) -> (..., num_out)."""
        quantised = self.in_training()
        if quantised is not None:
            return fp8_linears(x, [self.weight], [quantised])[0]
        if torch.is_grad_enabled() and kernels.usable(x, self.weight):
            return kernels.linear(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))

    def in_training(self) -> Quantised | None:
        """Return `quantised` if a gradient will be needed, else None."""
        return self.quantised if self.training and torch.is_grad_enabled() else None


def project(x: Tensor, maps: Sequence[Linear], bound: float | None) -> Sequence[Tensor]:
    """Return the maps of one x. In fp8 it is quantised once; `bound`: of |x|; None: unknown."""
    quantised: list[Quantised] = []
    for linear in maps:
        copy = linear.in_training()
        if copy is None:
            return [linear(x) for linear in maps]
        quantised.append(copy)
    return fp8_linears(x, [linear.weight for linear in maps], quantised, bound)


class Embedding(Weighted):
    """A table of vectors, stored in the compute dtype."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up int64 (...) -> (..., width)."""
        if tokens.device.type == "cuda" and SORTED_TABLE_GRADIENT:
            return SortedLookup.apply(tokens, self.weight)
        return F.embedding(tokens, self.weight)


class SortedLookup(torch.autograd.Function):
    """F.embedding whose gradient sums the tokens of each table row in sorted order.

    torch.compile would otherwise lower the gradient to atomic additions. Bitwise reproducible under
    `determinism=strict`: without it torch 2.11 adds atomically where few rows have many tokens.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        """Look up tokens int64 (...) in table (V, C) -> (..., C)."""
        ctx.save_for_backward(tokens)
        ctx.num_rows = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        """Return the table's gradient."""
        return None, table_gradient(grad_outputs[0], ctx.saved_tensors[0], ctx.num_rows)


@torch.library.custom_op("nanochat_flows::table_gradient", mutates_args=())
def table_gradient(grad: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    """Sum grad (..., C) into the rows (num_rows, C) of its tokens; opaque to torch's compiler."""
    # -1: no padding index. False: gradients are not divided by the frequency of their token.
    return torch.ops.aten.embedding_dense_backward(grad, tokens, num_rows, -1, False)


@table_gradient.register_fake
def _(grad: Tensor, tokens: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.size(-1))


def refresh_fp8(model: nn.Module, *, fast_gradients: bool = False) -> None:
    """Quantise the eligible matrices that changed since the last call: once after each step.

    `fast_gradients`: of the first call, see Quantised. Raises ConfigError if fp8 products cannot
    run on the device.
    """
    for module in model.modules():
        if isinstance(module, Linear) and is_eligible(module.weight):
            if module.quantised is None:
                module.quantised = Quantised(module.weight, fast_gradients=fast_gradients)
            module.quantised.refresh()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension; computed in fp32."""
    if rows.usable(x):
        return rows.normalise(x, eps)
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def relu_square(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return rows.relu_square(x) if rows.usable(x) else F.relu(x).square()


def mix_residual(x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a x + b first of two streams (B, T, C), a and b scalars."""
    return rows.mix(x, first, a, b) if rows.usable(x, first) else a * x + b * first


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary positions to x (B, T, heads, D): channel j is paired with channel j + D/2."""
    # nanochat rotates by minus the angle: a' = a cos + b sin, b' = b cos - a sin. Only the
    # difference of two positions matters to attention, but imported weights need this sign.
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def rotary_table(
    num_positions: int, head_dim: int, numerics: NumericsConfig, device: torch.device
) -> Rotary:
    """Return cos and sin (num_positions, 1, head_dim / 2) in the compute dtype."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (numerics.rotary_base ** (channels / head_dim))
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    dtype = compute_dtype(numerics.precision)
    # nanochat's older models rounded the table to bf16 even in fp32 runs (see eras.py).
    rounded = torch.bfloat16 if numerics.rotary_precision == "bf16" else dtype
    return angles.cos().to(rounded).to(dtype), angles.sin().to(rounded).to(dtype)
