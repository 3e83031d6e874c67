"""Cross-entropy under soft-capped logits, a block of rows at a time.

The logits of a micro-step are its largest tensor by far (T x V). Written with plain operations they
are walked over a dozen times in main memory; here each block is finished while the cache holds it.

Shapes: N tokens, C width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits in a block: 4 MB in fp32 on a CPU, where it must fit the cache; on a GPU large enough to
# keep it busy.
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**28}
SOFTCAP_LIMIT = 60.0  # exp(60) * V is far inside fp32, so the softmax needs no maximum


def softcap_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float
) -> Tensor:
    """Losses in nats, (N,) fp32, of logits softcap * tanh(hidden @ weight.T / softcap).

    hidden (N, C) and weight (V, C) of one dtype; targets (N,) int64, each a class.
    """
    assert softcap <= SOFTCAP_LIMIT
    return _SoftcapCrossEntropy.apply(hidden, weight, targets, softcap)


class _SoftcapCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float
    ) -> Tensor:
        size = max(1, BLOCK_ELEMENTS[hidden.device.type] // weight.size(0))
        tanhs: list[Tensor] = []
        sums: list[Tensor] = []
        losses: list[Tensor] = []
        for rows, target in zip(hidden.split(size), targets.split(size), strict=True):
            tanh = F.linear(rows, weight).float().div_(softcap).tanh_()
            total = tanh.mul(softcap).exp_().sum(dim=-1)
            picked = tanh.gather(1, target.unsqueeze(1)).squeeze(1)
            losses.append(total.log() - softcap * picked)
            tanhs.append(tanh)
            sums.append(total)
        ctx.save_for_backward(hidden, weight, targets, *tanhs, *sums)
        ctx.softcap, ctx.size = softcap, size
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad,) = grad_outputs
        hidden, weight, targets, *saved = ctx.saved_tensors
        tanhs, sums = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        blocks = [t.split(ctx.size) for t in (hidden, targets, grad, grad_hidden)]
        for tanh, total, rows, target, scale, into in zip(tanhs, sums, *blocks, strict=True):
            scale = scale.unsqueeze(1)
            z = tanh.mul(ctx.softcap).exp_().div_(total.unsqueeze(1))
            z[torch.arange(len(z), device=z.device), target] -= 1.0
            # times the slope of the soft cap and the incoming gradient
            z = z.mul_(torch.addcmul(scale, tanh, tanh * scale, value=-1)).to(hidden.dtype)
            torch.mm(z, weight, out=into)
            grad_weight += z.T @ rows
        return grad_hidden, grad_weight.to(weight.dtype), None, None
