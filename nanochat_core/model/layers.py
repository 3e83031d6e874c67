"""The layers of the transformer: linear maps, tables, norms, rotary positions, initial values.

Shapes: B rows, T tokens, P positions, D head dim.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat_core.config import ModelConfig, NumericsConfig
from nanochat_core.model.fp8 import Quantised, is_eligible
from nanochat_core.model.fp8 import linears as fp8_linears
from nanochat_core.model.gradient_sum import Weighted
from nanochat_core.model.matrices import gradient as matrix_gradient
from nanochat_core.model.native import kernels, rows
from nanochat_core.model.tables import gradient
from nanochat_core.runtime.hardware.device import compute_dtype
from nanochat_core.runtime.seeding import seed_for

Rotary: TypeAlias = tuple[Tensor, Tensor]  # cos, sin: (B or 1, T, 1, D/2)


def activation_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of what a pass of the model computes between matrix products.

    In a CPU's training bf16 is of linear maps and the head: its kernels for the rest are in fp32.
    """
    is_mixed = precision == "bf16" and device.type == "cpu" and torch.is_grad_enabled()
    return torch.float32 if is_mixed else compute_dtype(precision)


class LateModule(nn.Module):
    """A module that can be constructed under `torch.device("meta")` and allocated later."""

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Self:
        """Allocate all parameters, without initial values."""
        # Module's own calls `empty_like`, which for a meta tensor imports sympy: 0.8 CPU seconds.
        return self._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), recurse)


class Linear(Weighted):
    """A linear map without bias: an fp32 matrix, and products in `dtype`.

    Training in precision fp8 sets `quantised`; evaluation uses the matrix itself.
    """

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.dtype = torch.float32  # a GPT sets its own
        self.quantised: Quantised | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., num_in) -> (..., num_out), of the same dtype."""
        quantised = self.in_training()
        if quantised is not None:
            return fp8_linears(x, [self.weight], [quantised])[0]
        if torch.is_grad_enabled():
            narrow = x.to(self.dtype)
            if self.gradient_sum and matrix_gradient.adds(narrow, self.weight):
                return matrix_gradient.linear(narrow, self.weight, self.gradient_sum).to(x.dtype)
            if self.dtype == torch.float32 and kernels.usable(x, self.weight):
                return kernels.linear(x, self.weight)
        return F.linear(x.to(self.dtype), self.weight.to(self.dtype)).to(x.dtype)

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

    def forward(self, tokens: Tensor, ordered: gradient.Ordered | None = None) -> Tensor:
        """Look up int64 (...) -> (..., width). `ordered`: what `sort` returned of these tokens."""
        if self.gradient_sum and self._adds(tokens):
            return gradient.lookup(tokens, self.weight, self.gradient_sum, ordered)
        return F.embedding(tokens, self.weight)

    def sort(self, tokens: Tensor) -> gradient.Ordered | None:
        """Return the order of the tokens if the gradient will be added to a sum, else None."""
        return gradient.sort(tokens, len(self.weight)) if self._adds(tokens) else None

    def _adds(self, tokens: Tensor) -> bool:
        on_device = tokens.device.type in gradient.DEVICES
        return self.gradient_sum is not None and torch.is_grad_enabled() and on_device


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


@torch.no_grad()
def initialise(model: nn.Module, seed: int, config: ModelConfig, numerics: NumericsConfig) -> None:
    """Set every parameter of a GPT to its initial value, equally on every device and machine."""
    # Drawn on the CPU from a seed per name: neither device nor parameter order matters. Like sizes
    # in a row, since each row of threads waits for its slowest.
    named = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
    count = torch.get_num_threads()

    def draw(item: tuple[str, Tensor]) -> Tensor:
        return initial_value(seed, item[0], item[1].shape, config, numerics)

    with ThreadPoolExecutor(count) as pool:
        for first in range(0, len(named), count):  # not all at once: they are a second model
            some = named[first : first + count]
            for (_, parameter), value in zip(some, pool.map(draw, some), strict=True):
                parameter.copy_(value)


def initial_value(
    seed: int, name: str, shape: torch.Size, config: ModelConfig, numerics: NumericsConfig
) -> Tensor:
    """Draw a parameter's initial value, on the CPU in fp32."""
    n, bound = numerics, math.sqrt(3 / config.width)  # uniform with standard dev. 1/sqrt(width)
    generator = torch.Generator().manual_seed(seed_for(seed, "init", name))
    value = torch.empty(shape)
    match name.removesuffix(".weight").rpartition(".")[2]:
        case "wte":
            value.normal_(std=n.init_embedding_std, generator=generator)
        case "lm_head":
            value.normal_(std=0.001, generator=generator)
        case "c_fc":
            edge = n.init_c_fc_bound * bound
            value.uniform_(-edge, edge, generator=generator)
        case "c_proj" | "smear_lambda":
            value.zero_()
        case "ve_gate" | "smear_gate":
            value.uniform_(0.0, 0.02, generator=generator)
        case "resid_lambdas":
            value.copy_(torch.linspace(n.init_resid_first, n.init_resid_last, config.depth))
        case "x0_lambdas":
            value.copy_(torch.linspace(n.init_x0_first, n.init_x0_last, config.depth))
        case "backout_lambda":
            value.fill_(0.2)
        case _:  # c_q, c_k, c_v and the value embeddings
            value.uniform_(-bound, bound, generator=generator)
    return value
