"""A linear map whose backward pass adds to the optimizer's sum, see ../gradient_sum.py.

autograd's own gradient of a matrix is a product of few tiles, which torch's library divides among a
GPU's processors as well as it can; the optimizer then adds it. No GPU has run this: it is used only
where the placement asks for it (`weight_kernel`). Shapes: N tokens, I inputs, O outputs.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.errors import ConfigError
from nanochat_core.model.gradient_sum import GradientSum, take_by_number

DEVICES: set[str] = set()  # of matrices whose gradient is added: set by `choose_weight_kernel`
MIN_SIDE = 128  # a smaller matrix would leave most of a tile empty
TOLERANCE = 1e-3  # of the largest value, by which our kernel may differ; both sum in fp32


def choose_weight_kernel(wanted: bool, device: torch.device, precision: str) -> None:
    """Choose what computes gradients of matrices in bf16: our kernel if it is `wanted`, else torch.

    Call it before the optimizer is made. Raises ConfigError if the kernel cannot run on this
    device or in this precision of training, or differs from torch.
    """
    DEVICES.clear()
    if not wanted:
        return
    fault = None
    if device.type != "cuda" or find_spec("triton") is None:
        fault = f"it needs a GPU and the package triton, and the device is {device.type}"
    elif precision != "bf16":
        fault = f"it multiplies bf16, and the precision is {precision}"
    elif torch.cuda.get_device_capability(device)[0] < 9:
        fault = "it needs compute capability 9.0"
    elif not (found := error(device)) <= TOLERANCE:
        fault = f"it differs from torch by {found:.1e} of the largest value"
    if fault is not None:
        hint = "--place weight_kernel=false"
        raise ConfigError(f"the weight kernel cannot run here: {fault}", hint=hint)
    DEVICES.add(device.type)


def adds(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` can take these: (..., I) and (O, I)."""
    return x.dtype == torch.bfloat16 and may_add(weight)


def may_add(weight: Tensor) -> bool:
    """Return whether device and shape of a matrix (O, I) allow its gradient to be added."""
    is_large = min(weight.shape) >= MIN_SIDE and all(side % 8 == 0 for side in weight.shape)
    return weight.device.type in DEVICES and is_large


def linear(x: Tensor, weight: Tensor, into: GradientSum) -> Tensor:
    """Return x @ weight.T in x's dtype: (..., I), (O, I) -> (..., O)."""
    return _Linear.apply(x, weight.detach().to(x.dtype), into.proxy, into.handle)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, proxy: Tensor, handle: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, handle)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, handle = ctx.saved_tensors
        (grad,) = grad_outputs
        return grad @ weight, None, add_weight_gradient(grad, x, handle), None


@torch.library.custom_op("nanochat_flows::add_weight_gradient", mutates_args=())
def add_weight_gradient(grad: Tensor, x: Tensor, handle: Tensor) -> Tensor:
    """Add grad.T @ x to the GradientSum of a handle: grad (..., O), x (..., I); return any scalar.

    Opaque to torch's compiler, to which it changes nothing: the sum is no part of a graph.
    """
    total, holds = take_by_number(int(handle))
    left, right = (t.reshape(-1, t.size(-1)).contiguous() for t in (grad, x))
    if grad.device.type == "cpu":
        add_in_torch(left, right, total, holds=holds)
    else:
        from nanochat_core.model.matrices.kernel import add  # imports triton

        add(left, right, total, holds=holds)
    return total.new_empty(())


@add_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, handle: Tensor) -> Tensor:
    return grad.new_empty((), dtype=torch.float32)


def add_in_torch(grad: Tensor, x: Tensor, total: Tensor, *, holds: bool) -> None:
    """Do what `kernel.add` does, on any device."""
    product = grad.float().T @ x.float()
    (total.add_ if holds else total.copy_)(product)


def error(device: torch.device) -> float:
    """Return the kernel's largest error next to torch, over the largest value, of two additions."""
    from nanochat_core.model.matrices.kernel import add  # imports triton

    generator = torch.Generator(device).manual_seed(1)
    grad, x = (
        torch.randn(4100, side, device=device, generator=generator).bfloat16()
        for side in (768, 640)
    )
    found, expected = torch.empty(2, 768, 640, device=device)
    for holds in (False, True):
        add(grad, x, found, holds=holds)
        add_in_torch(grad, x, expected, holds=holds)
    return float((found - expected).abs().max() / expected.abs().max())
