"""The assignment of parameters to optimizers: matrices inside blocks to Muon, the rest to AdamW.

The constants are nanochat's. Those that changed between its eras, and the learning rates, come from
`OptimizerConfig`, whose learning rates already include the scale factors of batch and width.
"""

from dataclasses import dataclass

from nanochat_core.config import OptimizerConfig

MUON_PREFIX = "transformer.h."


@dataclass(frozen=True, kw_only=True)
class AdamWGroup:
    """Parameters that share AdamW's constants."""

    prefixes: tuple[str, ...]  # of parameter names
    lr: float
    beta1: float
    beta2: float
    weight_decay: float  # constant over the run; the step is lr * weight_decay


def adamw_groups(config: OptimizerConfig) -> tuple[AdamWGroup, ...]:
    """Return AdamW's groups. A group may match no parameter, if the model's era lacks that part."""
    return (
        AdamWGroup(
            prefixes=("lm_head.",),
            lr=config.lm_head_lr,
            beta1=0.8,
            beta2=config.lm_head_beta2,
            weight_decay=config.lm_head_weight_decay,
        ),
        AdamWGroup(
            prefixes=("transformer.wte.",),
            lr=config.embedding_lr,
            beta1=0.8,
            beta2=config.embedding_beta2,
            weight_decay=config.embedding_weight_decay,
        ),
        AdamWGroup(
            prefixes=("value_embeds.",),
            lr=config.value_embed_lr,
            beta1=0.8,
            beta2=0.995,
            weight_decay=0.01,
        ),
        AdamWGroup(
            prefixes=("resid_lambdas",),
            lr=config.residual_lr,
            beta1=0.8,
            beta2=0.95,
            weight_decay=0.05,
        ),
        AdamWGroup(
            prefixes=("x0_lambdas",), lr=config.x0_lr, beta1=0.96, beta2=0.95, weight_decay=0.0
        ),
        AdamWGroup(
            prefixes=("smear_gate.", "smear_lambda", "backout_lambda"),
            lr=config.smear_lr,
            beta1=0.8,
            beta2=0.95,
            weight_decay=0.0,
        ),
    )


def group_of(name: str, groups: tuple[AdamWGroup, ...]) -> AdamWGroup | None:
    """Return the AdamW group of a parameter; None means Muon updates it."""
    if name.startswith(MUON_PREFIX):
        return None
    found = [group for group in groups if name.startswith(group.prefixes)]
    assert len(found) == 1, f"parameter {name} belongs to {len(found)} optimizer groups"
    return found[0]


def layer_of(name: str) -> float:
    """Return the layer after which a backward pass (last layer first) has finished a gradient."""
    # lm_head's is ready first, that of the embedding and the scalars, used by every layer, last.
    for prefix in (MUON_PREFIX, "value_embeds."):
        if name.startswith(prefix):
            return int(name.removeprefix(prefix).partition(".")[0])
    return float("inf") if name.startswith("lm_head.") else -1
