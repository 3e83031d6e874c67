"""Matrix products in fp8 for training, with one scale per tensor from its largest absolute value.

Inputs and weights are e4m3, output gradients e5m2, results bf16. A weight is quantised once after
each optimizer step, together with the transpose that the backward pass needs, and is reused by
every micro-step of the step. Evaluation does not use fp8: it runs in bf16.

Runs on GPUs of compute capability 8.9 and above, and slowly on CPUs, where the tests check it. It
has not been run on a GPU: neither its speed nor whether a weight's gradient is better left in bf16
(WEIGHT_GRADIENT_IN_FP8) has been measured.

Shapes: M tokens, I inputs, O outputs.
"""

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
def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x as fp8 values of the same shape, and the fp32 scalar that they are multiples of."""
    # scale = largest / max(amax, 1e-12), divided in fp64 as nanochat does. The clamp saturates: a
    # plain cast would turn what rounds past the largest fp8 value into NaN (e4m3) or inf (e5m2).
    largest = torch.finfo(dtype).max
    scale = (largest / x.abs().amax().double().clamp(min=1e-12)).float()
    values = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return values, scale.reciprocal()


class Quantised:
    """The fp8 values of one weight. Call `refresh` before a forward pass to keep them current."""

    def __init__(self, weight: nn.Parameter) -> None:
        """Allocate for `weight` (O, I), which must be eligible. Raises as `check_device` does."""
        assert is_eligible(weight), f"a weight of shape {tuple(weight.shape)} is not for fp8"
        check_device(weight.device)
        self._weight = weight
        self._written: tuple[int, int] | None = None
        # Allocated once and written in place: a compiled forward pass holds on to these addresses.
        self.values = torch.empty(weight.shape, dtype=E4M3, device=weight.device)  # (O, I)
        self.transposed = torch.empty(weight.shape[::-1], dtype=E4M3, device=weight.device)
        self.unit = torch.empty((), dtype=torch.float32, device=weight.device)

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
        self._written = written
        return True

    def output(self, x: Tensor, unit: Tensor) -> Tensor:
        """Return x @ weight.T: x (M, I) e4m3 -> (M, O) bf16."""
        return _product(x, self.values.T, unit, self.unit, fast=True)

    def input_gradient(self, grad: Tensor, unit: Tensor) -> Tensor:
        """Return grad @ weight: grad (M, O) e5m2 -> (M, I) bf16."""
        # Fast accumulation only in the forward pass, as in nanochat: gradients sum in full fp32.
        return _product(grad, self.transposed.T, unit, self.unit, fast=False)


def weight_gradient(grad: Tensor, grad_unit: Tensor, x: Tensor, x_unit: Tensor) -> Tensor:
    """Return grad.T @ x: grad (M, O) e5m2, x (M, I) e4m3 -> (O, I) bf16. M: a multiple of 16."""
    columns = x.T.contiguous().T  # torch._scaled_mm takes its second factor column-major
    return _product(grad.T.contiguous(), columns, grad_unit, x_unit, fast=False)


def linear(x: Tensor, weight: Tensor, quantised: Quantised) -> Tensor:
    """Return x @ weight.T in fp8: x (..., I) -> (..., O) bf16. `quantised`: `weight`'s, current."""
    return _Linear.apply(x.flatten(0, -2), weight, quantised).unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantised: Quantised) -> Tensor:
        values, unit = quantise(x, E4M3)
        # The weight gradient sums over tokens, so their number M is a side of that product too.
        ctx.in_fp8 = WEIGHT_GRADIENT_IN_FP8 and len(x) % MULTIPLE == 0
        ctx.save_for_backward(values if ctx.in_fp8 else x, unit)
        ctx.quantised, ctx.dtype = quantised, weight.dtype
        return quantised.output(values, unit)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        x, unit = ctx.saved_tensors
        grad, grad_unit = quantise(grad_outputs[0], E5M2)
        grad_input = ctx.quantised.input_gradient(grad, grad_unit)
        if ctx.in_fp8:
            grad_weight = weight_gradient(grad, grad_unit, x, unit)
        else:
            grad_weight = grad_outputs[0].T @ x
        return grad_input, grad_weight.to(ctx.dtype), None


def _product(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, *, fast: bool) -> Tensor:
    """Multiply a (M, K) row-major by b (K, N) column-major. `fast` sums in fewer bits than fp32."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - there is no other name
        a, b, scale_a=a_unit, scale_b=b_unit, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
