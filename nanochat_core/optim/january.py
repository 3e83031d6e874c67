"""The parts of nanochat's January 2026 optimizer that differ: Newton-Schulz Muon, and clipping.

Muon was momentum and orthogonalisation alone: no weight decay, no scaling of rows, of neurons or of
the update's norm. Source: Muon (Keller Jordan, 2024) with its quintic iteration.

Two deliberate differences from nanochat. It clipped by the norm of each rank's own gradients before
they were averaged, so that ranks scaled theirs unequally; here it is the norm of the gradient that
the step uses. And it ran the iteration in bf16 even in an fp32 run; here `dtype` decides.

A stack is (N, R, C): N matrices of R rows (outputs) by C columns (inputs).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# a, b, c of Y <- a Y + (b A + c A^2) Y with A = Y Y^T. Chosen for the steepest slope at zero, so
# small singular values grow fast, and all end in about 0.7 to 1.2 rather than at 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5


def newton_schulz_muon_(
    weights: Tensor,
    grads: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    mu: float,
    dtype: torch.dtype,
) -> None:
    """Update weights and momentum in place; overwrites grads. All fp32 stacks.

    `dtype` is that of the matrix products. lr is before the shape factor: tall matrices step
    sqrt(R / C) times further.
    """
    lr *= math.sqrt(max(1.0, weights.size(-2) / weights.size(-1)))
    # M <- mu M + (1 - mu) G, then Nesterov's look-ahead (1 - mu) G + mu M.
    momentum.lerp_(grads, 1.0 - mu)
    nesterov = grads.lerp_(momentum, mu)
    weights.sub_(newton_schulz(nesterov.to(dtype)).float(), alpha=lr)


def newton_schulz(x: Tensor) -> Tensor:
    """Return roughly the orthogonal factor of each matrix of a stack, in x's dtype."""
    # Transposed if tall, so that Y Y^T is the smaller of the two products. The Frobenius norm
    # bounds the largest singular value, so dividing by it brings all into the iteration's range.
    tall = x.size(-2) > x.size(-1)
    y = x.mT if tall else x
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def squared_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the sum of squares over all of these tensors, (), fp32.

    Summed over ranks it is the whole gradient's, if each element is counted on one rank only.
    """
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    return torch.stack(norms).square().sum()


def clip_factor(total_norm: Tensor, grad_clip: float) -> Tensor:
    """Return the factor that limits the norm of the gradient to `grad_clip`: () to ().

    A tensor, so that a step does not wait for the device. NaN stays NaN.
    """
    return (grad_clip / (total_norm + 1e-6)).clamp(max=1.0)
