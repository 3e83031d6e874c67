"""Matrix products and the loss of training on a CPU, by compiled kernels of our own.

They divide no sum among threads: the bits do not depend on the number of threads. Where they cannot
be built, torch computes instead. The products of bf16 are always torch's. Shapes: N tokens, C
width, V vocabulary.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nanochat_core.model.native.build import LIBRARY
from nanochat_core.runtime.hardware.cpp_library import Unavailable

MIN_WIDTH = 64  # a product with a shorter side is torch's: packing would be most of the work
ROWS = 512  # tokens whose logits exist at a time in `loss_in_bf16`


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """Return the kernels, built if need be; None means that this machine cannot have them."""
    try:
        return LIBRARY.load()
    except Unavailable:
        return None


def usable(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels compute x (..., C) with weight (V, C)."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and min(weight.shape) >= MIN_WIDTH
        and not torch.compiler.is_compiling()
        and load() is not None
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T of x (..., C) and weight (V, C), differentiable; see `usable`."""
    return _Linear.apply(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x.flatten(0, -2), weight.T).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad_outputs[0].flatten(0, -2)
        of_x = multiply(grad, weight).view_as(x) if ctx.needs_input_grad[0] else None
        of_weight = multiply(grad.T, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of fp32 matrices on the CPU, of any strides."""
    library = load()
    assert library is not None
    threads = torch.get_num_threads()
    out = a.new_empty(a.size(0), b.size(1))
    work = a.new_empty(threads * library.nf_work())
    library.nf_multiply(
        threads,
        *out.shape,
        a.size(1),
        a.data_ptr(),
        *a.stride(),
        b.data_ptr(),
        *b.stride(),
        out.data_ptr(),
        work.data_ptr(),
    )
    return out if a.size(1) else out.zero_()


def loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (N,) and the gradients of hidden and weight: what `_walk` of loss.py returns.

    hidden (N, C), weight (V, C), targets (N,) int64, scale (N,): fp32. Without `scale` the
    gradients are empty.
    """
    library = load()
    assert library is not None
    # The kernels write where a target says.
    assert not len(targets) or 0 <= int(targets.min()) <= int(targets.max()) < len(weight)
    threads = torch.get_num_threads()
    hidden, weight, targets = hidden.contiguous(), weight.contiguous(), targets.contiguous()
    scale = None if scale is None else scale.float().contiguous()
    losses = hidden.new_empty(len(hidden))
    if scale is None:
        grads = hidden.new_empty(0), weight.new_empty(0)
    elif len(hidden):
        grads = torch.empty_like(hidden), torch.empty_like(weight)
    else:
        grads = torch.empty_like(hidden), torch.zeros_like(weight)
    size = library.nf_loss_work(threads, hidden.size(1), len(weight), scale is not None)
    work = hidden.new_empty(size)
    library.nf_loss(
        threads,
        *hidden.shape,
        len(weight),
        hidden.data_ptr(),
        weight.data_ptr(),
        targets.data_ptr(),
        None if scale is None else scale.data_ptr(),
        softcap,
        losses.data_ptr(),
        *(grad.data_ptr() for grad in grads),
        work.data_ptr(),
    )
    return losses, *grads


def loss_in_bf16(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `loss` returns, of a weight in bf16, with products in bf16.

    The gradient of the weight is fp32: a sum over the blocks of tokens.
    """
    library = load()
    assert library is not None
    losses = hidden.new_empty(len(hidden))
    shapes = (hidden.shape, weight.shape) if scale is not None else ((0,), (0,))
    of_hidden, of_weight = (hidden.new_zeros(shape) for shape in shapes)
    for first in range(0, len(hidden), ROWS):
        rows, target = hidden[first : first + ROWS], targets[None, first : first + ROWS]
        z = weight @ rows.to(weight.dtype).T  # (V, R)
        picked = torch.tanh(z.gather(0, target)[0].float() / softcap)
        total = torch.empty_like(picked)
        threads, sizes = torch.get_num_threads(), z.shape
        library.nf_slopes(threads, *sizes, z.data_ptr(), softcap, total.data_ptr())
        loss = total.log() - softcap - softcap * picked
        losses[first : first + ROWS] = loss
        if scale is None:
            continue
        # Logit j of a token has the gradient factor * z[j] by now, but for the target's: p - 1
        # with p = exp(-loss), where expm1 avoids cancellation, times its slope.
        share = torch.expm1(-loss) * (1 - picked.square())
        z.scatter_(0, target, (share * total / 4).to(z.dtype)[None])
        factor = (scale[first : first + ROWS] * 4 / total)[:, None]
        of_hidden[first : first + ROWS] = factor * (z.T @ weight)
        of_weight += z @ (factor * rows).to(z.dtype)
    return losses, of_hidden, of_weight
