"""Cross-entropy of soft-capped logits, computed one block of rows at a time to save memory.

The logits of a micro-step are its largest tensor by far (N x V), so only a block of them exists at
a time. If the weight of every token in the loss is known beforehand (`softcap_loss`), the forward
pass computes the gradients too, and the backward pass only scales them. If not (`softcap_losses`),
the backward pass computes the logits a second time.

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

from nanochat_core.model.fp8 import E4M3, E5M2, MULTIPLE, Quantised, quantise, weight_gradient
from nanochat_core.model.native import kernels
from nanochat_core.runtime.hardware.compile import fused

# A CPU processes a block of rows in chunks of columns that fit its cache, as several operations
# follow one another on each; with fewer rows the matrix products are slow. On a GPU the operations
# are one fused kernel, and a block is one chunk, large enough to keep the GPU busy.
CPU_ROWS, CPU_COLUMNS = 512, 1024
GPU_ELEMENTS = 2**28
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
) -> Tensor:
    """Return the sum of `scale` times each token's loss in nats: a scalar, fp32.

    The logits are softcap * tanh(hidden @ weight.T / softcap): hidden (N, C) and weight (V, C) of
    one dtype. targets (N,) int64, each a class; scale (N,) fp32, which gets no gradient. With
    `quantised`, of the same weight, the products are fp8. `bounded`: their scales come from bounds,
    and no row of hidden has a norm above sqrt(C).
    """
    assert softcap <= SOFTCAP_LIMIT
    return _Loss.apply(hidden, weight, targets, scale, softcap, quantised, bounded)


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
        targets: Tensor,
        scale: Tensor,
        softcap: float,
        quantised: Quantised | None,
        bounded: bool,
    ) -> Tensor:
        # A logit's gradient is scale * (p - 1 or p) * slope, and neither factor exceeds 1.
        largest = scale.abs().amax() if bounded else None
        head = _Head(weight=weight, softcap=softcap, quantised=quantised, largest=largest)
        wanted = any(ctx.needs_input_grad)
        losses, *gradients = _walk(hidden, head, targets, scale if wanted else None)
        ctx.save_for_backward(*gradients)
        return losses.dot(scale)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        factor = grad_outputs[0]  # 0-dimensional, so it does not promote their dtype
        return grad_hidden * factor, grad_weight * factor, None, None, None, None, None


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
        _, *gradients = _walk(hidden, head, targets, grad_outputs[0])
        return *gradients, None, None


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The matrix that maps hidden states to logits, and its products."""

    weight: Tensor
    softcap: float
    quantised: Quantised | None = None
    largest: Tensor | None = None  # of a logit's gradient; None: fp8 scales come from amax

    def blocks(self, num_tokens: int) -> list[slice]:
        """Return the slices that divide the tokens into blocks."""
        rows = CPU_ROWS
        if self.weight.device.type != "cpu":
            rows = max(16, GPU_ELEMENTS // len(self.weight) // 16 * 16)  # 16: see fp8.MULTIPLE
        return [slice(first, first + rows) for first in range(0, num_tokens, rows)]

    def chunks(self) -> list[slice]:
        """Return the slices that divide the vocabulary into chunks."""
        # fp8 weights are one tensor with one scale, so they are not chunked.
        size = len(self.weight)
        columns = CPU_COLUMNS if self.weight.device.type == "cpu" and not self.quantised else size
        return [slice(first, min(first + columns, size)) for first in range(0, size, columns)]

    def logits(self, rows: Tensor, chunk: slice) -> Tensor:
        """Compute the logits before the soft cap: (R, C) -> (R, S)."""
        if self.quantised is None:
            return F.linear(rows, self.weight[chunk])
        return self.quantised.output(*self._quantise_rows(rows))

    def add_gradients(
        self, grad: Tensor, rows: Tensor, chunk: slice, into_rows: Tensor, into_weight: Tensor
    ) -> None:
        """Accumulate the gradients of rows (R, C) and of the weight's chunk (S, C)."""
        if self.quantised is None:
            _add_product(into_rows, grad, self.weight[chunk])
            _add_product(into_weight, grad.T, rows)
            return
        values, unit = quantise(grad, E5M2, self.largest)
        into_rows.add_(self.quantised.input_gradient(values, unit))
        if len(rows) % MULTIPLE:  # the weight's gradient is a sum over the rows
            _add_product(into_weight, grad.T, rows)
        else:
            into_weight.add_(weight_gradient(values, unit, *self._quantise_rows(rows)))

    def _quantise_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return quantise(rows, E4M3, None if self.largest is None else math.sqrt(rows.size(-1)))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right, of one dtype, to a tensor whose dtype may be wider."""
    if left.dtype == into.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)


def _walk(
    hidden: Tensor, head: _Head, targets: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses (N,) fp32, and the gradients of hidden and weight, empty without `scale`."""
    if head.quantised is None and kernels.usable(hidden, head.weight):
        return kernels.loss(hidden, head.weight, targets, scale, head.softcap)
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    grad_hidden = torch.zeros_like(hidden) if scale is not None else hidden.new_empty(0)
    shape = head.weight.shape if scale is not None else (0,)
    grad_weight = head.weight.new_zeros(shape, dtype=torch.float32)
    chunks = head.chunks()
    # A narrow dtype would round the sum after each chunk.
    wide = hidden.dtype if len(chunks) == 1 else torch.float32
    for block in head.blocks(len(hidden)):
        rows, target = hidden[block], targets[block].unsqueeze(1)
        logits, total, picked = _read(rows, head, target, keep_slopes=scale is not None)
        loss = total.log() - head.softcap * picked  # (R, 1)
        losses[block] = loss.squeeze(1)
        if scale is not None:
            factor = scale[block].unsqueeze(1)
            # The target's logit has gradient p - 1, and p = exp(-loss): expm1 avoids cancellation.
            # Times its slope, 1 - tanh^2.
            of_target = factor * torch.expm1(-loss) * (1 - picked.square())
            grad_rows = grad_hidden[block]
            into_rows = grad_rows.to(wide)  # zeros; the same tensor where the dtype is
            for chunk in chunks:
                grad = _gradient(logits.popleft(), head.softcap, factor / total, rows.dtype)
                at, inside = _place(target, chunk)
                value = torch.where(inside, of_target.to(grad.dtype), grad.gather(1, at))
                grad.scatter_(1, at, value)
                head.add_gradients(grad, rows, chunk, into_rows, grad_weight[chunk])
            if into_rows is not grad_rows:
                grad_rows.copy_(into_rows)
        del logits  # freed before the next block's are allocated
    return losses, grad_hidden, grad_weight.to(head.weight.dtype)


def _read(
    rows: Tensor, head: _Head, target: Tensor, *, keep_slopes: bool
) -> tuple[deque[Tensor], Tensor, Tensor]:
    """Return for rows (R, C): logits by chunk, the sum of exp(logit), the tanh of the target's.

    On a CPU no logits are returned, but with `keep_slopes` exp(logit) * s * (1 - s).
    """
    logits: deque[Tensor] = deque()
    total, picked = rows.new_zeros((2, len(rows), 1), dtype=torch.float32)
    for chunk in head.chunks():
        z = head.logits(rows, chunk)
        at, inside = _place(target, chunk)
        picked += torch.where(inside, torch.tanh(z.gather(1, at).float() / head.softcap), 0.0)
        # On a CPU the gradient's exponentials are those of the sum, as computing them is slow; a
        # GPU's fused kernel computes them again and reads a narrower tensor.
        if z.device.type == "cpu":
            s = z.float().mul_(2 / head.softcap).sigmoid_()
            exp = (s * (2 * head.softcap)).exp_()
            total += exp.sum(-1, keepdim=True) * math.exp(-head.softcap)
            if keep_slopes:
                logits.append(s.addcmul_(s, s, value=-1).mul_(exp))
            continue
        total += _sum_exp(z, head.softcap)
        logits.append(z)
    return logits, total, picked


def _place(target: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return the target's column in a chunk (any one if outside), and whether it is inside."""
    inside = (target >= chunk.start) & (target < chunk.stop)
    return (target - chunk.start).clamp(0, chunk.stop - chunk.start - 1), inside


@fused
def _sum_exp(z: Tensor, softcap: float) -> Tensor:
    """Return the sum of exp(logit) per row of uncapped logits: (R, S) -> (R, 1) fp32."""
    # exp(softcap * (2 s - 1)), with the constant factor exp(-softcap) taken out of the sum.
    exp = (_sigmoid(z, softcap) * (2 * softcap)).exp_()
    return exp.sum(-1, keepdim=True) * math.exp(-softcap)


@fused
def _gradient(z: Tensor, softcap: float, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(logit) * slope * factor (R, 1) for what `_read` returned: (R, S)."""
    factor = factor * (4 * math.exp(-softcap))
    if z.device.type == "cpu":
        return z.mul_(factor).to(dtype)
    s = _sigmoid(z, softcap)
    exp = (s * (2 * softcap)).exp_()
    slope = s.addcmul_(s, s, value=-1)
    return exp.mul_(slope).mul_(factor).to(dtype)


def _sigmoid(z: Tensor, softcap: float) -> Tensor:
    return (z.float() * (2 / softcap)).sigmoid_()
