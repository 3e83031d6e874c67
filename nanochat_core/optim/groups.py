"""Which parameter is updated how: matrices inside blocks by Muon, everything else by AdamW.

The constants are nanochat's; the learning rates come from `OptimizerConfig`, where the scale
factors of batch and width are multiplied in already.
"""

from dataclasses import dataclass

MUON_PREFIX = "transformer.h."


@dataclass(frozen=True, kw_only=True)
class AdamWGroup:
    """Parameters that share AdamW's constants."""

    prefixes: tuple[str, ...]  # of parameter names
    lr: str  # a field of OptimizerConfig
    beta1: float
    beta2: float
    weight_decay: float  # constant over the run; the step is lr * weight_decay


ADAMW_GROUPS = (
    AdamWGroup(prefixes=("lm_head.",), lr="lm_head_lr", beta1=0.8, beta2=0.96, weight_decay=0.01),
    AdamWGroup(
        prefixes=("transformer.wte.",),
        lr="embedding_lr",
        beta1=0.8,
        beta2=0.995,
        weight_decay=0.001,
    ),
    AdamWGroup(
        prefixes=("value_embeds.",),
        lr="value_embed_lr",
        beta1=0.8,
        beta2=0.995,
        weight_decay=0.01,
    ),
    AdamWGroup(
        prefixes=("resid_lambdas",), lr="residual_lr", beta1=0.8, beta2=0.95, weight_decay=0.05
    ),
    AdamWGroup(prefixes=("x0_lambdas",), lr="x0_lr", beta1=0.96, beta2=0.95, weight_decay=0.0),
    AdamWGroup(
        prefixes=("smear_gate.", "smear_lambda", "backout_lambda"),
        lr="smear_lr",
        beta1=0.8,
        beta2=0.95,
        weight_decay=0.0,
    ),
)


def adamw_group(name: str) -> AdamWGroup | None:
    """The AdamW group of a parameter; None: it is Muon's."""
    if name.startswith(MUON_PREFIX):
        return None
    groups = [group for group in ADAMW_GROUPS if name.startswith(group.prefixes)]
    assert len(groups) == 1, f"parameter {name} belongs to {len(groups)} optimizer groups"
    return groups[0]
