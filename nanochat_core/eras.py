"""nanochat's eras: the parts that its model had at a time, and the constants of its arithmetic.

Between January and March 2026 nanochat's checkpoints kept their names and shapes while the
arithmetic changed. A checkpoint does not record the constants it was trained with, and with others
its logits are silently wrong. An era is one row of all that changed, named by the first day of the
code that trained it.

Initial weights and recipes are known for the first era and the last. Models of those between are
read, for evaluation, chat and export, and not trained.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from nanochat_core.config import ModelConfig, NumericsConfig
from nanochat_core.errors import ConfigError, ModelError


@dataclass(frozen=True, kw_only=True)
class Era:
    """The parts and constants of one era's models. Fields are named as in the configs."""

    first_day: str
    commit: str | None  # of nanochat's repository, the era's first; None means not recorded
    residual_scalars: bool
    value_embeds: bool
    smear: bool
    backout: bool
    # A short window is sequence_len / share, rounded up to a multiple: (share, multiple).
    short_window: tuple[int, int] | None
    rotary_base: float
    rotary_precision: str
    qk_scale: float
    softcap: float
    gate_scale: float
    gate_channels: int
    init_embedding_std: float
    init_c_fc_bound: float


MARCH_14 = Era(
    first_day="2026-03-14",
    commit="a825e63",
    residual_scalars=True,
    value_embeds=True,
    smear=True,
    backout=True,
    short_window=(4, 128),
    rotary_base=100000.0,
    rotary_precision="compute",
    qk_scale=1.2,
    softcap=15.0,
    gate_scale=3.0,
    gate_channels=12,
    init_embedding_std=0.8,
    init_c_fc_bound=0.4,
)
MARCH_9 = dataclasses.replace(
    MARCH_14,
    first_day="2026-03-09",
    commit="6ed7d1d",
    smear=False,
    backout=False,
    short_window=(3, 128),
    qk_scale=1.15,
)
MARCH_2 = dataclasses.replace(
    MARCH_9,
    first_day="2026-03-02",
    commit="aba30cb",
    short_window=(2, 1),
    rotary_base=10000.0,
    rotary_precision="bf16",
    qk_scale=1.0,
    softcap=20.0,
    gate_scale=2.0,
    gate_channels=32,
)
JANUARY_17 = dataclasses.replace(MARCH_2, first_day="2026-01-17", commit=None, softcap=15.0)
JANUARY_11 = dataclasses.replace(
    JANUARY_17,
    first_day="2026-01-11",
    commit="aa530cd",
    value_embeds=False,
    gate_scale=MARCH_14.gate_scale,  # without value embeddings the gate's constants mean nothing
    gate_channels=MARCH_14.gate_channels,
)
JANUARY_5 = dataclasses.replace(
    JANUARY_11,
    first_day="2026-01-05",
    commit="ae0bf52",
    residual_scalars=False,
    short_window=None,
    init_embedding_std=1.0,
    init_c_fc_bound=1.0,
)
ERAS = {
    era.first_day: era for era in (JANUARY_5, JANUARY_11, JANUARY_17, MARCH_2, MARCH_9, MARCH_14)
}
HEAD = MARCH_14.first_day


def open_era(name: str) -> Era:
    """Return the era that began on this day, such as "2026-01-05". Raises ConfigError."""
    if name not in ERAS:
        raise ConfigError(f"there is no era '{name}'", hint=f"one of: {', '.join(ERAS)}")
    return ERAS[name]


def numerics(precision: str, *, era: str = HEAD) -> NumericsConfig:
    """Return the constants of an era; by default of nanochat's latest."""
    row = open_era(era)
    return NumericsConfig(
        precision=precision,
        rotary_base=row.rotary_base,
        rotary_precision=row.rotary_precision,
        qk_scale=row.qk_scale,
        softcap=row.softcap,
        gate_scale=row.gate_scale,
        gate_channels=row.gate_channels,
        smear_channels=24,
        norm_eps=2.0**-23,
        init_embedding_std=row.init_embedding_std,
        init_c_fc_bound=row.init_c_fc_bound,
    )


def of_era(model: ModelConfig, era: str, *, pattern: str) -> ModelConfig:
    """Return the same shape with an era's parts, and windows in `pattern`: "SSSL"."""
    row = open_era(era)
    return dataclasses.replace(
        model,
        windows=windows_of(pattern, model.depth, model.sequence_len, era=era),
        residual_scalars=row.residual_scalars,
        value_embeds=row.value_embeds,
        smear=row.smear,
        backout=row.backout,
    )


def windows_of(pattern: str, depth: int, sequence_len: int, *, era: str = HEAD) -> tuple[int, ...]:
    """Return the keys to the left per layer. `pattern` of S (short) and L (long) is repeated over
    the layers; the last layer is always long. Raises ConfigError."""
    if not pattern or set(pattern) - set("SL"):
        raise ConfigError(f"the window pattern is '{pattern}'", hint="S and L, as in SSSL")
    # (share, multiple): today ceil(T / 4 / 128) * 128, so 512 of 2048.
    rule = open_era(era).short_window
    if rule is None and "S" in pattern:
        raise ConfigError(f"the era {era} has no short windows, the pattern is '{pattern}'")
    share, multiple = rule or (1, 1)
    short = min(math.ceil(sequence_len / share / multiple) * multiple, sequence_len)
    letters = [pattern[layer % len(pattern)] for layer in range(depth - 1)] + ["L"]
    return tuple(short if letter == "S" else sequence_len for letter in letters)


def eras_with(shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the eras whose models have tensors of these names and shapes, oldest first.

    There are two if a checkpoint does not distinguish them: 2026-01-17 and 2026-03-02 differ in
    softcap only. Raises ModelError for a model of no era.
    """
    if any(name.startswith("bigram_embed.") for name in shapes):
        raise ModelError(
            "this model has bigram embeddings, as nanochat's of 25 to 28 January 2026 had",
            hint="no other version has them, and this one cannot run it",
        )
    # The input widths of the gates. A gate that is not a matrix matches no era.
    gates = {shape[1:] for name, shape in shapes.items() if name.endswith(".ve_gate.weight")}
    found = tuple(
        era.first_day
        for era in ERAS.values()
        if era.residual_scalars == ("resid_lambdas" in shapes)
        and era.smear == ("smear_gate.weight" in shapes)
        and gates == ({(era.gate_channels,)} if era.value_embeds else set())
    )
    if not found:
        raise ModelError(
            "the model's tensors are of no era of nanochat that is known",
            hint=f"known are {', '.join(ERAS)}",
        )
    return found
