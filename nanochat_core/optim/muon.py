"""Muon on stacks of equally shaped matrices: the update is the orthogonalised momentum.

An update is Nesterov momentum, rows equalised (MuonEq), orthogonalised (Polar Express), rescaled to
the norm of an orthogonal matrix (Muon+) and per neuron (NorMuon), with cautious weight decay.

Sources: Muon (Keller Jordan), Polar Express (arXiv 2505.16932), NorMuon (arXiv 2510.05491),
cautious weight decay (arXiv 2510.12402); nanochat's constants.

A stack is (N, R, C): N matrices of R rows (outputs) by C columns (inputs).
"""

import math

import torch
from torch import Tensor

from nanochat_core.runtime.hardware.compile import fused, scalars

BETA2 = 0.9  # of NorMuon's second moment
# a, b, c of each iteration Y <- a Y + (b A + c A^2) Y with A = Y Y^T. Each triple is optimal for
# the range of singular values that the one before leaves.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def muon_(
    weights: Tensor,
    grads: Tensor,
    momentum: Tensor,
    second_moment: Tensor,
    *,
    lr: float,
    mu: float,
    weight_decay: float,
    dtype: torch.dtype,
) -> None:
    """Update weights, momentum and second moment in place. All fp32 stacks.

    second_moment is (N, R, 1), or (N, 1, C) for matrices wider than tall. `dtype` is that of the
    matrix products. lr is before the shape factor: tall matrices step sqrt(R / C) times further.
    """
    lr *= math.sqrt(max(1.0, weights.size(-2) / weights.size(-1)))
    mu_, lr_, decay = scalars(weights.device, mu, lr, weight_decay)
    update = orthogonalise(_first_iterate(momentum, grads, mu_, dtype))
    _update(weights, update, second_moment, lr_, decay)


def second_moment_shape(rows: int, cols: int) -> tuple[int, int]:
    """Return the shape of one matrix's second moment: a value per index of its longer side."""
    return (rows, 1) if rows >= cols else (1, cols)


@fused
def _first_iterate(
    momentum: Tensor, grads: Tensor, mu: float | Tensor, dtype: torch.dtype
) -> Tensor:
    """Update the momentum; return what `orthogonalise` starts from."""
    # M <- mu M + (1 - mu) G, then Nesterov's look-ahead U = (1 - mu) G + mu M, both as lerps.
    momentum.lerp_(grads, 1.0 - mu)
    # Rows are equalised first (MuonEq): a few iterations come closer to the orthogonal factor if
    # no row dominates the norm by which they normalise.
    x = equalise_rows(grads.lerp(momentum, mu).to(dtype))
    # All singular values must be at most 1 at the start; 1.01 leaves room for bf16's rounding.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x / (norm * 1.01 + 1e-6)


@fused
def _update(
    weights: Tensor,
    update: Tensor,
    second_moment: Tensor,
    lr: float | Tensor,
    weight_decay: float | Tensor,
) -> None:
    """Update weights and second moment in place by an orthogonalised momentum."""
    update = equalise_neurons(_with_norm_of_orthogonal(update.float()), second_moment)
    # Cautious decay: only where the update moves a weight towards zero as well, so that decay never
    # works against the gradient. W <- W - lr (U + decay * W [U W >= 0]).
    decayed = torch.where(update * weights >= 0, weights, 0.0)
    _add_multiple(weights, _add_multiple(update, decayed, weight_decay), -lr)


def _add_multiple(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Add factor * y to x in place."""
    return x.add_(y * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def equalise_rows(x: Tensor) -> Tensor:
    """Scale every row to the same norm, the root mean square of the rows' norms."""
    # That mean is |X|_F / sqrt(R), so the norm of the matrix is unchanged.
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    mean = torch.linalg.vector_norm(norms, dim=-2, keepdim=True) / math.sqrt(x.size(-2))
    return x * (mean / norms.clamp(min=1e-6)).to(x.dtype)


def orthogonalise(y: Tensor) -> Tensor:
    """Return nearly the orthogonal factor of each matrix (singular values near 1), in its dtype.

    No singular value of `y` exceeds 1.
    """
    tall = y.size(-2) > y.size(-1)
    for a, b, c in POLAR_EXPRESS:
        # The smaller Gram matrix: Y (a + b A + c A^2) with A = Y^T Y if tall, else from the left.
        gram = y.mT @ y if tall else y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (y, polynomial) if tall else (polynomial, y)
        y = torch.baddbmm(y, left, right, beta=a)
    return y


def equalise_neurons(update: Tensor, second_moment: Tensor) -> Tensor:
    """Divide by a running root mean square per row or column (NorMuon); keep each matrix's norm."""
    dim = -1 if second_moment.size(-1) == 1 else -2
    mean_square = update.square().mean(dim=dim, keepdim=True)
    second_moment.lerp_(mean_square, 1.0 - BETA2)
    scale = second_moment.clamp(min=1e-10).rsqrt()
    before = mean_square.sum(dim=(-2, -1), keepdim=True).sqrt()
    after = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    # `before` and `after` are the norms of update and scaled update divided by sqrt(size(dim)), a
    # factor that cancels in their ratio; the floor of 1e-10 on the norm must be divided too.
    floor = 1e-10 / math.sqrt(update.size(dim))
    return update * (scale * (before / after.clamp(min=floor)))


def _with_norm_of_orthogonal(update: Tensor) -> Tensor:
    """Scale each matrix to the Frobenius norm of an orthogonal one, sqrt(min(R, C)) (Muon+)."""
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
    # The clamp keeps a zero update zero: a matrix that feeds a projection initialised to zero has
    # no gradient at first.
    target = math.sqrt(min(update.size(-2), update.size(-1)))
    return update * (target / norm.clamp(min=1e-6))
