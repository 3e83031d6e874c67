"""Norms, rotary positions, relu^2 and the weighted residual of fp32 training on a CPU, compiled.

torch makes several passes over memory of each, and of its gradient; these kernels make one. Bits do
not depend on the number of threads. Shapes: B rows, T tokens, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from nanochat_core.model.native.kernels import load


def usable(*tensors: Tensor) -> bool:
    """Return whether the kernels compute these in a pass of training."""
    return (
        torch.is_grad_enabled()
        and all(
            t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous()
            for t in tensors
        )
        and not torch.compiler.is_compiling()
        and load() is not None
    )


def normalise(x: Tensor, eps: float) -> Tensor:
    """Return x (..., C) / sqrt(mean(x^2) + eps), the mean over C; see `usable`."""
    return _Normalise.apply(x, eps)


def rotate_normalise(x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float) -> Tensor:
    """Return `scale` times the normalised heads of x (B, T, H, D), rotated by cos, sin (T, D/2)."""
    return _RotateNormalise.apply(x, cos, sin, eps, scale)


def relu_square(x: Tensor) -> Tensor:
    """Return relu(x)^2 of x (..., C)."""
    return _ReluSquare.apply(x)


def mix(x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a x + b first of x, first (..., C), a and b scalars."""
    return _Mix.apply(x, first, a, b)


def _call(name: str, *args: Any) -> None:
    """Call a kernel with the number of threads, and tensors as pointers."""
    pointers = (a.data_ptr() if isinstance(a, Tensor) else a for a in args)
    getattr(load(), name)(torch.get_num_threads(), *pointers)


def _shape(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.size(-1), x.size(-1)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, factors = torch.empty_like(x), x.new_empty(_shape(x)[0])
        _call("nf_normalise", *_shape(x), x, eps, y, factors)
        ctx.save_for_backward(y, factors)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, factors = ctx.saved_tensors
        to = torch.empty_like(y)
        _call("nf_normalise_grad", *_shape(y), y, grad_outputs[0].contiguous(), factors, to)
        return to, None


class _RotateNormalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float) -> Tensor:
        y, factors = torch.empty_like(x), x.new_empty(x.shape[:-1])
        _call("nf_rotate_normalise", *x.shape, x, cos, sin, eps, scale, y, factors)
        ctx.save_for_backward(y, cos, sin, factors)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, cos, sin, factors = ctx.saved_tensors
        # Attention returns it by heads; only the channels of a head must lie side by side.
        grad, to = grad_outputs[0], torch.empty_like(y)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        _call(
            "nf_rotate_normalise_grad",
            *y.shape,
            y,
            cos,
            sin,
            ctx.scale,
            factors,
            grad,
            *grad.stride()[:-1],
            to,
        )
        return to, None, None, None, None


class _ReluSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        _call("nf_relu_square", *_shape(x), x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        to = torch.empty_like(x)
        _call("nf_relu_square_grad", *_shape(x), x, grad_outputs[0].contiguous(), to)
        return to


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, first)
        ctx.factors = a.item(), b.item()
        y = torch.empty_like(x)
        _call("nf_mix", *_shape(x), x, first, *ctx.factors, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        x, first = ctx.saved_tensors
        of_x, of_first, sums = torch.empty_like(x), torch.empty_like(x), x.new_empty(2)
        work = x.new_empty(2 * _shape(x)[0])
        grad = grad_outputs[0].contiguous()
        _call("nf_mix_grad", *_shape(x), x, first, *ctx.factors, grad, of_x, of_first, sums, work)
        return of_x, of_first, sums[0], sums[1]
