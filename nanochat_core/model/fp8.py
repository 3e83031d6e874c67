"""Matrix products in fp8 for training, with one scale per tensor.

Inputs and weights are e4m3, output gradients e5m2, results bf16. A weight is quantised once after
each optimizer step, together with the transpose that the backward pass needs, and is reused by
every micro-step of the step. Evaluation does not use fp8: it runs in bf16.

A scale comes from the tensor's largest absolute value, which takes a pass over the tensor before
the one that casts it. With `numerics.fp8_scales=bound` it comes from a bound where one is known
beforehand, so that the kernel that computes a tensor also casts it: normalised activations are at
most sqrt(C), and what is between the MLP's matrices is bounded by the norms of their rows and
columns (Cauchy-Schwarz). A bound is loose by a few powers of two. fp8 is a floating-point format,
so that costs only its smallest numbers: e4m3 has 15 powers of two of full precision, e5m2 30.

Runs on GPUs of compute capability 8.9 and above, and slowly on CPUs, where the tests check it. An
H100 has run it; neither its speed nor whether a weight's gradient is better left in bf16
(WEIGHT_GRADIENT_IN_FP8) has been measured.

Shapes: M tokens, I inputs, O outputs.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanochat_core.errors import ConfigError
from nanochat_core.runtime.hardware.compile import fused

E4M3 = torch.float8_e4m3fn  # 448 at most; the finer mantissa, for inputs and weights
E5M2 = torch.float8_e5m2  # 57344 at most; the wider range, for gradients
MULTIPLE = 16  # torch._scaled_mm requires both sides of a matrix to be multiples of it
MIN_SIDE = 128  # below this, quantising costs more than the product saves
WEIGHT_GRADIENT_IN_FP8 = True


def is_eligible(weight: Tensor) -> bool:
    """Return whether products with this weight (O, I) can run in fp8."""
    return all(side % MULTIPLE == 0 and side >= MIN_SIDE for side in weight.shape)


def check_device(device: torch.device) -> None:
    """Raise ConfigError if fp8 products cannot run on this device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"precision fp8 needs compute capability 8.9, this GPU has {major}.{minor}",
            hint="train in bf16: --set numerics.precision=bf16",
        )


@fused
def quantise(
    x: Tensor, dtype: torch.dtype, bound: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """Return x as fp8 values of the same shape, and the fp32 scalar that they are multiples of.

    `bound`, a number or a scalar tensor, is at least x's largest absolute value; None means
    exactly that value.
    """
    # scale = largest / max(amax, 1e-12), divided in fp64 as nanochat does. The clamp saturates: a
    # plain cast would turn what rounds past the largest fp8 value into NaN (e4m3) or inf (e5m2).
    largest = torch.finfo(dtype).max
    if bound is None:
        bound = x.abs().amax()
    most = bound if isinstance(bound, Tensor) else torch.full((), bound, device=x.device)
    scale = (largest / most.double().clamp(min=1e-12)).float()
    values = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return values, scale.reciprocal()


@fused
def quantise_both(
    x: Tensor, dtype: torch.dtype, bound: Tensor | float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (M, K) as fp8 values by rows, the same by columns, and their unit: `quantise`."""
    values, unit = quantise(x, dtype, bound)
    return values, values.T.contiguous().T, unit


class Quantised:
    """The fp8 values of one weight. Call `refresh` before a forward pass to keep them current."""

    def __init__(self, weight: nn.Parameter, *, fast_gradients: bool = False) -> None:
        """Allocate for `weight` (O, I), which must be eligible. Raises as `check_device` does.

        `fast_gradients`: the products that give the input's gradient sum in fewer bits than fp32.
        """
        assert is_eligible(weight), f"a weight of shape {tuple(weight.shape)} is not for fp8"
        check_device(weight.device)
        self._weight, self._fast_gradients = weight, fast_gradients
        self._written: tuple[int, int] | None = None
        # Allocated once and written in place: a compiled forward pass holds on to these addresses.
        self.values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)  # (O, I)
        self.transposed = torch.empty(weight.shape[::-1], dtype=E4M3, device=weight.device)
        self.unit = torch.empty((), dtype=torch.float32, device=weight.device)
        # The largest norms of a row and of a column: they bound what products with them give.
        self.row_norm, self.column_norm = torch.empty(2, device=weight.device)

    @torch.no_grad()
    def refresh(self) -> bool:
        """Quantise the weight if it has changed since the last call; return whether it has."""
        # The version counter alone misses `parameter.data = ...`, which changes the address.
        written = (self._weight._version, self._weight.data_ptr())
        if written == self._written:
            return False
        values, unit = quantise(self._weight.detach(), E4M3)
        self.values.copy_(values)
        self.transposed.copy_(values.T)
        self.unit.copy_(unit)
        for dim, norm in ((1, self.row_norm), (0, self.column_norm)):
            norm.copy_(torch.linalg.vector_norm(self._weight, dim=dim, dtype=torch.float32).amax())
        self._written = written
        return True

    def output(self, x: Tensor, unit: Tensor) -> Tensor:
        """Return x @ weight.T: x (M, I) e4m3 -> (M, O) bf16."""
        return _product(x, self.values.T, unit, self.unit, fast=True)

    def input_gradient(self, grad: Tensor, unit: Tensor) -> Tensor:
        """Return grad @ weight: grad (M, O) e5m2 -> (M, I) bf16."""
        # By default fast only in the forward pass, as in nanochat: gradients sum in full fp32.
        return _product(grad, self.transposed.T, unit, self.unit, fast=self._fast_gradients)


def weight_gradient(grad: Tensor, grad_unit: Tensor, x: Tensor, x_unit: Tensor) -> Tensor:
    """Return grad.T @ x: grad (M, O) e5m2, x (M, I) e4m3 -> (O, I) bf16. M: a multiple of 16.

    Copies a factor that is not column-major.
    """
    columns = x.T.contiguous().T  # torch._scaled_mm takes its second factor column-major
    return _product(grad.T.contiguous(), columns, grad_unit, x_unit, fast=False)


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    quantised: Sequence[Quantised],
    bound: float | None = None,
) -> tuple[Tensor, ...]:
    """Return x @ weight.T in fp8 for each weight: x (..., I) -> (..., O) bf16.

    `quantised`: the weights', current. `bound`: x's, see `quantise`. x is quantised once.
    """
    outputs = _Linears.apply(x.flatten(0, -2), bound, quantised, *weights)
    return tuple(output.unflatten(0, x.shape[:-1]) for output in outputs)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bound: float | None, copies: Sequence[Quantised], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        values, unit = quantise(x, E4M3, bound)
        # The weight gradient sums over tokens, so their number M is a side of that product too.
        ctx.in_fp8 = WEIGHT_GRADIENT_IN_FP8 and len(x) % MULTIPLE == 0
        ctx.save_for_backward(values if ctx.in_fp8 else x, unit)
        ctx.copies, ctx.dtypes = copies, [weight.dtype for weight in weights]
        return tuple(copy.output(values, unit) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, unit = ctx.saved_tensors
        of_input: list[Tensor] = []
        of_weights: list[Tensor] = []
        for output, copy, dtype in zip(grad_outputs, ctx.copies, ctx.dtypes, strict=True):
            grad, grad_unit = quantise(output, E5M2)
            of_input.append(copy.input_gradient(grad, grad_unit))
            of_weight = weight_gradient(grad, grad_unit, x, unit) if ctx.in_fp8 else output.T @ x
            of_weights.append(of_weight.to(dtype))
        return sum(of_input[1:], of_input[0]), None, None, *of_weights


def mlp(x: Tensor, up: Tensor, down: Tensor, quantised: tuple[Quantised, Quantised]) -> Tensor:
    """Return relu(x @ up.T)^2 @ down.T in fp8, with scales from bounds: (..., C) -> (..., C) bf16.

    x: normalised, so that no row's norm exceeds sqrt(C). up (H, C), down (C, H). The number of
    rows is a multiple of MULTIPLE.
    """
    return _MLP.apply(x.flatten(0, -2), up, down, *quantised).unflatten(0, x.shape[:-1])


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, down: Tensor, up8: Quantised, down8: Quantised
    ) -> Tensor:
        norm = math.sqrt(x.size(-1))
        values, unit = quantise(x, E4M3, norm)
        hidden = up8.output(values, unit)
        largest = norm * up8.row_norm  # of |hidden|
        active, active_unit = quantise(hidden.relu().square(), E4M3, largest.square())
        ctx.save_for_backward(values, unit, hidden, active, active_unit, largest)
        ctx.up8, ctx.down8, ctx.dtypes = up8, down8, (up.dtype, down.dtype)
        return down8.output(active, active_unit)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        values, unit, hidden, active, active_unit, largest = ctx.saved_tensors
        (grad,) = grad_outputs
        grad8, grad_unit = quantise(grad, E5M2)
        grad_down = weight_gradient(grad8, grad_unit, active, active_unit)
        norm = torch.linalg.vector_norm(grad, dim=-1, dtype=torch.float32).amax()
        of_active = ctx.down8.input_gradient(grad8, grad_unit)
        of_hidden, hidden_unit = quantise(
            of_active.float() * (2 * hidden.float().relu()),
            E5M2,
            norm * ctx.down8.column_norm * (2 * largest),
        )
        grad_up = weight_gradient(of_hidden, hidden_unit, values, unit)
        grad_input = ctx.up8.input_gradient(of_hidden, hidden_unit)
        up, down = ctx.dtypes
        return grad_input, grad_up.to(up), grad_down.to(down), None, None


def _product(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, *, fast: bool) -> Tensor:
    """Multiply a (M, K) row-major by b (K, N) column-major. `fast` sums in fewer bits than fp32."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - there is no other name
        a, b, scale_a=a_unit, scale_b=b_unit, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
