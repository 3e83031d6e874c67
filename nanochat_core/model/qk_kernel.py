"""Rotary positions and QK norm of a training pass: one Triton kernel for each direction.

torch's compiler reads and writes q, k and their gradients more often, since a sum over a head and
what follows it in other halves are two kernels to it. These read each once and write each once. On
a CPU they run in Triton's interpreter, which tests use. On an H100 they agree with torch; what they
gain has not been measured, so they are used only where the placement asks for them (`qk_kernel`).

Shapes: B rows, T tokens, H heads, D head dim, a power of two.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from nanochat_core.model.layers import rms_norm, rotate

HEADS = 32  # of a program
WARPS = 4


@triton.jit
def rotated(x_ptr, cos_ptr, sin_ptr, at, table, inside, eps, HALF: tl.constexpr):
    """Return both halves of x after the rotation, cos, sin, and 1 / their root mean square."""
    a = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)
    y, z = a * cos + b * sin, b * cos - a * sin
    mean = tl.sum(y * y + z * z, 1) / (2 * HALF)
    return y, z, cos, sin, tl.rsqrt(mean + eps)[:, None]


@triton.jit
def forward(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    T,
    H,
    eps,
    scale,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """out = scale * normalised(rotated(x)) for HEADS of num_heads = B * T * H heads.

    x, out (B, T, H, 2 * HALF); cos, sin (T, HALF).
    """
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, HALF)[None, :]
    inside = (head < num_heads)[:, None]
    at = head[:, None] * (2 * HALF) + j
    table = (head // H % T)[:, None] * HALF + j
    y, z, _, _, factor = rotated(x_ptr, cos_ptr, sin_ptr, at, table, inside, eps, HALF)
    tl.store(out_ptr + at, y * factor * scale, mask=inside)
    tl.store(out_ptr + at + HALF, z * factor * scale, mask=inside)


@triton.jit
def backward(
    grad_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    T,
    H,
    grad_row,
    grad_token,
    grad_head,
    eps,
    scale,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """out = x's gradient, from that of `forward`'s output, whose strides are given."""
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, HALF)[None, :]
    inside = (head < num_heads)[:, None]
    at = head[:, None] * (2 * HALF) + j
    token = head // H
    table = (token % T)[:, None] * HALF + j
    y, z, cos, sin, factor = rotated(x_ptr, cos_ptr, sin_ptr, at, table, inside, eps, HALF)
    start = token // T * grad_row + token % T * grad_token + head % H * grad_head
    g = tl.load(grad_ptr + start[:, None] + j, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(grad_ptr + start[:, None] + j + HALF, mask=inside, other=0.0).to(tl.float32)
    # Of the norm: scale * r * (g - y r^2 mean(g y)), with r = 1 / the root mean square of y.
    along = factor * factor * (tl.sum(g * y + h * z, 1) / (2 * HALF))[:, None]
    g = scale * factor * (g - y * along)
    h = scale * factor * (h - z * along)
    # The rotation's transpose.
    tl.store(out_ptr + at, g * cos - h * sin, mask=inside)
    tl.store(out_ptr + at + HALF, g * sin + h * cos, mask=inside)


@torch.library.custom_op("nanochat_flows::rotate_normalise", mutates_args=())
def rotate_normalise(x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float) -> Tensor:
    """Rotate x (B, T, H, D) by cos, sin (1, T, 1, D/2), normalise every head, multiply by scale."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    arguments = (x, cos, sin, out, *sizes(x), eps, scale)
    kernel: Any = forward
    kernel[grid(x)](*arguments, HALF=x.size(-1) // 2, HEADS=HEADS, num_warps=WARPS)
    return out


@torch.library.custom_op("nanochat_flows::rotate_normalise_gradient", mutates_args=())
def rotate_normalise_gradient(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float
) -> Tensor:
    """Return the gradient of x, given that of what `rotate_normalise` returned."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    out = torch.empty_like(x)
    arguments = (grad, x, cos, sin, out, *sizes(x), *grad.stride()[:3], eps, scale)
    kernel: Any = backward
    kernel[grid(x)](*arguments, HALF=x.size(-1) // 2, HEADS=HEADS, num_warps=WARPS)
    return out


def error(device: torch.device, head_dim: int) -> float:
    """Return the largest error of an output and a gradient against torch's, over the largest value.

    In bf16, and the gradient is laid out as SDPA gives it.
    """
    shape, generator = (2, 33, 3, head_dim), torch.Generator(device).manual_seed(1)
    x, grad = (torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(2))
    angles = torch.rand(1, shape[1], 1, head_dim // 2, device=device, generator=generator)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    found: list[list[Tensor]] = []
    for call in (rotate_normalise, in_torch):
        leaf = x.clone().requires_grad_()
        out = call(leaf, cos, sin, 1e-6, 1.2)
        found.append([out.detach(), *torch.autograd.grad(out, leaf, grad.to(out.dtype))])
    errors = [(a.float() - b).abs().max() / b.abs().max() for a, b in zip(*found, strict=True)]
    return float(torch.stack(errors).max())


def in_torch(x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float) -> Tensor:
    """Return what `rotate_normalise` returns, in fp32."""
    return rms_norm(rotate(x.float(), (cos.float(), sin.float())), eps) * scale


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Return B * T * H, T and H."""
    rows, tokens, heads, _ = x.shape
    return rows * tokens * heads, tokens, heads


def grid(x: Tensor) -> tuple[int]:
    """Return the number of programs."""
    return (-(-sizes(x)[0] // HEADS),)


@rotate_normalise.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float) -> Tensor:
    return x.new_empty(x.shape)


@rotate_normalise_gradient.register_fake
def _(grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, eps: float, scale: float) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.eps, ctx.scale = inputs
    ctx.save_for_backward(x, cos, sin)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of_x = rotate_normalise_gradient(grad, *ctx.saved_tensors, ctx.eps, ctx.scale)
    return of_x, None, None, None, None


rotate_normalise.register_autograd(_gradient, setup_context=_save)
