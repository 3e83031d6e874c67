"""Cross-entropy of soft-capped logits, computed a block of rows at a time to save memory.

The logits of a micro-step are its largest tensor by far (N x V), so only a block of them exists at
a time: on a GPU as many as a fixed share of its memory holds, often all; on a CPU as many as its
cache holds. If the weight of every token in the loss is known beforehand (`softcap_loss`), the
forward pass computes the gradients too. If not (`softcap_losses`), the backward pass computes the
logits a second time.

With s = sigmoid(2 z / softcap), a logit is softcap * (2 s - 1) and its slope in z is 4 s (1 - s).

Shapes: N tokens, C width, V vocabulary; R rows of a block, S columns of a chunk.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model.fp8 import (
    E4M3,
    E5M2,
    MULTIPLE,
    Quantised,
    quantise_both,
    weight_gradient,
)
from nanochat_core.model.gradient_sum import GradientSum, unit_gradient
from nanochat_core.model.native import kernels
from nanochat_core.runtime.hardware.compile import fused

# A CPU processes a block of rows in chunks of columns that fit its cache, as several operations
# follow one another on each; with fewer rows the matrix products are slow.
CPU_ROWS, CPU_COLUMNS = 512, 1024
# On a GPU the operations are one fused kernel, and a block has whole rows: a multiple of GPU_ROWS,
# with which the product for the hidden states fills 132 processors with two full waves at width
# 768, and as many as GPU_SHARE of the memory holds.
GPU_ROWS, GPU_SHARE = 11264, 1 / 16
# As in NumericsConfig. exp(2 * 30) * V is far inside fp32, so the softmax needs no maximum.
SOFTCAP_LIMIT = 30.0


def softcap_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    *,
    softcap: float,
    quantised: Quantised | None = None,
    bounded: bool = False,
    gradient_sum: GradientSum | None = None,
) -> Tensor:
    """Return the sum of `scale` times each token's loss in nats: a scalar, fp32.

    The logits are softcap * tanh(hidden @ weight.T / softcap): hidden (N, C) and weight (V, C) of
    one dtype, or on a CPU hidden in fp32 and a weight in bf16, as the products then are. targets
    (N,) int64, each a class; scale (N,) fp32, which gets no gradient. With `quantised`, of the same
    weight, the products are fp8. `bounded`: their scales come from bounds, and no row of hidden has
    a norm above sqrt(C). With `gradient_sum`, of the same weight, the backward pass adds the
    weight's gradient to it.
    """
    assert softcap <= SOFTCAP_LIMIT
    proxy = None if gradient_sum is None else gradient_sum.proxy
    weight = weight if gradient_sum is None else weight.detach()
    others = softcap, quantised, bounded, gradient_sum
    return _Loss.apply(hidden, weight, proxy, targets, scale, *others)


def softcap_losses(hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float) -> Tensor:
    """Return each token's loss in nats, (N,) fp32, differentiable per token. See `softcap_loss`."""
    assert softcap <= SOFTCAP_LIMIT
    return _Losses.apply(hidden, weight, targets, softcap)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        proxy: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        softcap: float,
        quantised: Quantised | None,
        bounded: bool,
        gradient_sum: GradientSum | None,
    ) -> Tensor:
        if not len(hidden):  # on a CPU, of rows without a target: fp8 would have nothing to scale
            quantised, bounded = None, False
        # A logit's gradient is scale * (p - 1 or p) * slope, and neither factor exceeds 1.
        largest = scale.abs().amax() if bounded else None
        head = _Head(weight=weight, softcap=softcap, quantised=quantised, largest=largest)
        wanted = any(ctx.needs_input_grad)
        losses, *gradients = _walk(hidden, head, targets, scale if wanted else None)
        ctx.save_for_backward(*gradients)
        ctx.dtype, ctx.gradient_sum = weight.dtype, gradient_sum
        return losses.dot(scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_outputs[0]  # 0-dimensional, so it does not promote their dtype
        of_hidden, *of_weight = ctx.saved_tensors
        if factor is not unit_gradient(factor.device):
            of_hidden, of_weight[0] = of_hidden * factor, of_weight[0] * factor
        if ctx.gradient_sum is None:
            gradients = of_hidden, _whole(*of_weight).to(ctx.dtype), None
        else:
            into, holds = ctx.gradient_sum.take()
            _add_whole(into if holds else into.zero_(), *of_weight)
            gradients = of_hidden, None, factor
        return *gradients, None, None, None, None, None, None


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.softcap = softcap
        return _walk(hidden, _Head(weight=weight, softcap=softcap), targets, None)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        head = _Head(weight=weight, softcap=ctx.softcap)
        _, of_hidden, *of_weight = _walk(hidden, head, targets, grad_outputs[0])
        return of_hidden, _whole(*of_weight).to(weight.dtype), None, None


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The matrix that maps hidden states to logits."""

    weight: Tensor
    softcap: float
    quantised: Quantised | None = None
    largest: Tensor | None = None  # of a logit's gradient; None: fp8 scales come from amax


def _walk(hidden: Tensor, head: _Head, targets: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
    """Return losses (N,) fp32 and, with `scale`, the gradients of hidden and weight.

    The weight's is one tensor, or the two of which `_whole` makes it.
    """
    if head.quantised or hidden.device.type != "cpu":
        return _walk_rows(hidden, head, targets, scale)
    if kernels.usable(hidden, head.weight):
        return kernels.loss(hidden, head.weight, targets, scale, head.softcap)
    if hidden.dtype != head.weight.dtype and kernels.load() is not None:  # hidden in fp32
        return kernels.loss_in_bf16(hidden, head.weight, targets, scale, head.softcap)
    losses, of_hidden, of_weight = _walk_chunks(hidden.to(head.weight.dtype), head, targets, scale)
    return losses, of_hidden.to(hidden.dtype), of_weight


def _whole(gradient: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the weight's gradient (V, C); with `rows` (N, C) it is gradient (N, V).T @ rows."""
    return gradient if rows is None else gradient.T @ rows


def _add_whole(into: Tensor, gradient: Tensor, rows: Tensor | None = None) -> None:
    """Add what `_whole` returns to a tensor whose dtype may be wider."""
    if rows is None:
        into.add_(gradient)
    else:
        _add_product(into, gradient.T, rows)


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, of one dtype, to a tensor whose dtype may be wider."""
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    elif into.device.type == "cuda":  # one product that adds to fp32; a CPU has none
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        into.add_(left @ right)


def _walk_rows(
    hidden: Tensor, head: _Head, targets: Tensor, scale: Tensor | None
) -> tuple[Tensor, ...]:
    """Do what `_walk` does on a GPU and in fp8: blocks of whole rows, few and large operations."""
    size = gpu_rows(head.weight, in_fp8=head.quantised is not None)
    blocks = [slice(first, first + size) for first in range(0, len(hidden), size)]
    losses: list[Tensor] = []
    of_hidden: list[Tensor] = []
    of_weight: list[Tensor] = []
    if len(blocks) != 1:  # else the only block's
        of_weight.append(torch.zeros_like(head.weight, dtype=torch.float32))
    for block in blocks:
        rows, target = hidden[block], targets[block].unsqueeze(1)
        z, *narrow = _logits(rows, head)
        some = scale[block].unsqueeze(1) if scale is not None else None
        loss, *factors = _read_rows(z, target, some, head.softcap)
        losses.append(loss)
        if factors:
            factor, of_target = factors
            grad = _gradient_rows(z, factor, head.softcap).scatter_(1, target, of_target)
            of_rows, *whole = _gradients(grad, rows, head, *narrow)
            of_hidden.append(of_rows)
            if len(blocks) == 1:
                of_weight = whole
            else:
                _add_whole(of_weight[0], *whole)
            del grad, whole
        del z  # freed before the next block's are allocated
    if scale is None:
        return (_joined(losses),)
    return _joined(losses), _joined(of_hidden), *of_weight


def gpu_rows(weight: Tensor, *, in_fp8: bool) -> int:
    """Return the number of rows of a block on a GPU."""
    memory = 0
    if weight.device.type == "cuda":
        memory = torch.cuda.get_device_properties(weight.device).total_memory
    # The gradient takes the logits' place. In fp8 it is in bf16, and in two layouts.
    row = len(weight) * (4 if in_fp8 else weight.element_size())
    return GPU_ROWS * max(1, int(memory * GPU_SHARE / row / GPU_ROWS))


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _logits(rows: Tensor, head: _Head) -> tuple[Tensor, ...]:
    """Return logits (R, V) before the soft cap; in fp8 also the rows by columns and their unit."""
    if head.quantised is None:
        return (F.linear(rows, head.weight),)
    bound = None if head.largest is None else math.sqrt(rows.size(-1))
    values, columns, unit = quantise_both(rows, E4M3, bound)
    return head.quantised.output(values, unit), columns, unit


def _gradients(grad: Tensor, rows: Tensor, head: _Head, *narrow: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of rows (R, C) and, as `_walk` does, of the weight."""
    if head.quantised is None:
        return grad @ head.weight, grad, rows
    values, columns, unit = quantise_both(grad, E5M2, head.largest)
    of_rows = head.quantised.input_gradient(values, unit)
    if len(rows) % MULTIPLE:  # the weight's gradient is a sum over the rows
        return of_rows, grad, rows
    return of_rows, weight_gradient(columns, unit, *narrow)


@fused
def _read_rows(
    z: Tensor, target: Tensor, scale: Tensor | None, softcap: float
) -> tuple[Tensor, ...]:
    """Return the losses (R,) of uncapped logits (R, V); target and scale are (R, 1).

    With `scale` also the factor of `_gradient_rows`, and the gradient of the target's logit.
    """
    # exp(softcap * (2 s - 1)), with the constant factor exp(-softcap) taken out of the sum.
    exp = (_sigmoid(z, softcap) * (2 * softcap)).exp_()
    total = exp.sum(-1, keepdim=True) * math.exp(-softcap)
    picked = torch.tanh(z.gather(1, target).float() / softcap)
    loss = total.log() - softcap * picked
    if scale is None:
        return (loss.squeeze(1),)
    return loss.squeeze(1), scale / total, _of_target(loss, picked, scale).to(z.dtype)


@fused
def _gradient_rows(z: Tensor, factor: Tensor, softcap: float) -> Tensor:
    """Overwrite uncapped logits (R, V) with exp(logit) * slope * factor (R, 1); return them."""
    s = _sigmoid(z, softcap)
    exp = (s * (2 * softcap)).exp_()
    slope = s.addcmul_(s, s, value=-1)
    return z.copy_(exp.mul_(slope).mul_(factor * (4 * math.exp(-softcap))))


def _of_target(loss: Tensor, picked: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the target's logit before the cap; `picked` is its tanh."""
    # The target's logit has gradient p - 1, and p = exp(-loss): expm1 avoids cancellation.
    # Times its slope, 1 - tanh^2.
    return scale * torch.expm1(-loss) * (1 - picked.square())


def _sigmoid(z: Tensor, softcap: float) -> Tensor:
    return (z.float() * (2 / softcap)).sigmoid_()


def _walk_chunks(
    hidden: Tensor, head: _Head, targets: Tensor, scale: Tensor | None
) -> tuple[Tensor, ...]:
    """Do what `_walk` does on a CPU: blocks of rows in chunks of columns that fit its cache."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    grad_hidden = torch.zeros_like(hidden) if scale is not None else hidden.new_empty(0)
    shape = head.weight.shape if scale is not None else (0,)
    grad_weight = head.weight.new_zeros(shape, dtype=torch.float32)
    size = len(head.weight)
    chunks = [slice(at, min(at + CPU_COLUMNS, size)) for at in range(0, size, CPU_COLUMNS)]
    # A narrow dtype would round the sum after each chunk.
    wide = hidden.dtype if len(chunks) == 1 else torch.float32
    for first in range(0, len(hidden), CPU_ROWS):
        block = slice(first, first + CPU_ROWS)
        rows, target = hidden[block], targets[block].unsqueeze(1)
        slopes, total, picked = _read_chunks(rows, head, target, chunks)
        loss = total.log() - head.softcap * picked  # (R, 1)
        losses[block] = loss.squeeze(1)
        if scale is None:
            continue
        factor = scale[block].unsqueeze(1)
        of_target = _of_target(loss, picked, factor).to(rows.dtype)
        factor = factor / total * (4 * math.exp(-head.softcap))
        grad_rows = grad_hidden[block]
        into_rows = grad_rows.to(wide)  # zeros; the same tensor where the dtype is
        for chunk in chunks:
            grad = slopes.popleft().mul_(factor).to(rows.dtype)
            at, inside = _place(target, chunk)
            grad.scatter_(1, at, torch.where(inside, of_target, grad.gather(1, at)))
            _add_product(into_rows, grad, head.weight[chunk])
            _add_product(grad_weight[chunk], grad.T, rows)
        if into_rows is not grad_rows:
            grad_rows.copy_(into_rows)
    return losses, grad_hidden, grad_weight.to(head.weight.dtype)


def _read_chunks(
    rows: Tensor, head: _Head, target: Tensor, chunks: list[slice]
) -> tuple[deque[Tensor], Tensor, Tensor]:
    """Return for rows (R, C): exp(logit) * s * (1 - s) by chunk, the sum of exp(logit), the tanh of
    the target's logit."""
    slopes: deque[Tensor] = deque()
    total, picked = rows.new_zeros((2, len(rows), 1), dtype=torch.float32)
    for chunk in chunks:
        z = F.linear(rows, head.weight[chunk])
        at, inside = _place(target, chunk)
        picked += torch.where(inside, torch.tanh(z.gather(1, at).float() / head.softcap), 0.0)
        s = z.float().mul_(2 / head.softcap).sigmoid_()
        exp = (s * (2 * head.softcap)).exp_()
        total += exp.sum(-1, keepdim=True) * math.exp(-head.softcap)
        # The gradient's exponentials are those of the sum: computing them again would be slow.
        slopes.append(s.addcmul_(s, s, value=-1).mul_(exp))
    return slopes, total, picked


def _place(target: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return the target's column in a chunk (any one if outside), and whether it is inside."""
    inside = (target >= chunk.start) & (target < chunk.stop)
    return (target - chunk.start).clamp(0, chunk.stop - chunk.start - 1), inside
