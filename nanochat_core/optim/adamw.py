"""AdamW on lists of tensors: decoupled weight decay first, both moments bias-corrected."""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nanochat_core.optim.groups import AdamWGroup
from nanochat_core.runtime.hardware.compile import fused, scalars

EPS = 1e-10  # nanochat's; torch's default is 1e-8


def adamw_(
    parameters: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    *,
    step: int,
    lr: float,
    group: AdamWGroup,
) -> None:
    """Update the parameters and both moments in place, in one pass over memory.

    All four lists match in shapes and dtypes, but gradients may be in fp32 where the rest is in
    bf16, which is computed in fp32 and rounded when stored. `step` is the number of this update,
    counted from 1.
    """
    # p <- p (1 - lr * decay); m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
    # p <- p - lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) + eps).
    if grads[0].dtype != parameters[0].dtype:  # torch's function takes one dtype
        shrink, rate, correction = scalars(
            grads[0].device,
            1 - lr * group.weight_decay,
            lr / (1 - group.beta1**step),
            1 / (1 - group.beta2**step),
        )
        for tensors in zip(parameters, grads, exp_avg, exp_avg_sq, strict=True):
            _update(*tensors, shrink, rate, correction, group.beta1, group.beta2)
        return
    adamw(
        parameters,
        grads,
        exp_avg,
        exp_avg_sq,
        [],
        # torch's function increments these itself, one tensor for each parameter
        [torch.full((), step - 1.0, device=p.device) for p in parameters],
        fused=True,
        amsgrad=False,
        beta1=group.beta1,
        beta2=group.beta2,
        lr=lr,
        weight_decay=group.weight_decay,
        eps=EPS,
        maximize=False,
    )


@fused
def _update(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    shrink: float | Tensor,
    rate: float | Tensor,
    correction: float | Tensor,
    beta1: float,
    beta2: float,
) -> None:
    """Update a parameter and its moments, narrower than its gradient."""
    mean = exp_avg.float() * beta1 + grad * (1 - beta1)
    square = exp_avg_sq.float() * beta2 + grad * grad * (1 - beta2)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    p.copy_(p.float() * shrink - rate * mean / ((square * correction).sqrt() + EPS))
