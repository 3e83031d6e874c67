"""AdamW on lists of tensors: decoupled weight decay first, both moments bias-corrected."""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nanochat_core.optim.groups import AdamWGroup

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

    All four lists match in shapes and dtypes; bf16 is computed in fp32 and rounded when stored.
    `step` is the number of this update, counted from 1.
    """
    # p <- p (1 - lr * decay); m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
    # p <- p - lr / (1 - b1^step) * m / (sqrt(v / (1 - b2^step)) + eps).
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
