"""Every era of nanochat's model is the same class with other settings."""

import dataclasses
import math

import pytest
import torch

from nanochat_core.eras import ERAS, HEAD, eras_with, numerics, of_era, windows_of
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import model_for_depth, num_lm_head_params, num_matrix_params, num_params
from tests.support.nanochat_core.random_gpt import randomise, shape_of
from tests.support.nanochat_core.train.recipe_reference import logits_of

pytestmark = pytest.mark.torch

FIRST = "2026-01-05"
SHAPE = shape_of(*[32] * 4)
PARTS = {
    "residual_scalars": {"resid_lambdas", "x0_lambdas"},
    "smear": {"smear_gate.weight", "smear_lambda"},
    "backout": {"backout_lambda"},
    "value_embeds": {
        *(f"value_embeds.{i}.weight" for i in (1, 3)),
        *(f"transformer.h.{i}.attn.ve_gate.weight" for i in (1, 3)),
    },
}


def config_of(era):
    return of_era(SHAPE, era, pattern="L" if era == FIRST else "SL")


def noisy_model(era, *, shape=None):
    """Every parameter random, so that nothing hides behind a zero projection."""
    return randomise(GPT(shape or config_of(era), numerics("fp32", era=era)), seed=2)


def tokens_of(rows, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE.vocab_size, (rows, length), generator=generator)


@pytest.mark.parametrize("era", ERAS)
def test_the_forward_pass_of_every_era_is_its_recipe(era):
    model, tokens = noisy_model(era), tokens_of(1, 32)
    expected = logits_of(model, tokens)
    assert model(tokens).dtype == torch.float32
    assert expected.std() > 0.5
    torch.testing.assert_close(model(tokens).detach().double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("era", ERAS)
def test_a_model_has_the_parameters_of_its_era_and_no_others(era):
    names = set(noisy_model(era).state_dict())
    row = ERAS[era]
    for part, of_part in PARTS.items():
        assert names & of_part == (of_part if getattr(row, part) else set()), part
    assert len(names) == 2 + 6 * 4 + sum(len(PARTS[p]) for p in PARTS if getattr(row, p))


@pytest.mark.parametrize(
    ("era", "depth"),
    [*((era, 7) for era in ERAS), *((HEAD, depth) for depth in (1, 3, 4, 11, 12, 20, 32))],
)
def test_counted_parameters_are_the_models_own(era, depth):
    config = model_for_depth(depth)
    config = config if era == HEAD else of_era(config, era, pattern="L")
    constants = numerics("bf16", era=era)
    with torch.device("meta"):
        model = GPT(config, constants)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) == num_params(config, constants)
    inside = sum(size for name, size in sizes.items() if name.startswith("transformer.h."))
    assert inside == num_matrix_params(config, constants)
    assert sizes["lm_head.weight"] == num_lm_head_params(config)


def test_the_first_era_begins_with_wider_embeddings_and_a_full_c_fc():
    config = dataclasses.replace(config_of(FIRST), width=128, vocab_size=2000)
    model = GPT(config, numerics("fp32", era=FIRST))
    model.init_weights(42)
    weights = model.state_dict()
    assert weights["transformer.wte.weight"].std() == pytest.approx(1.0, rel=0.02)
    largest = weights["transformer.h.2.mlp.c_fc.weight"].abs().max()
    assert largest == pytest.approx(math.sqrt(3 / 128), rel=0.01)
    assert weights["lm_head.weight"].std() == pytest.approx(0.001, rel=0.02)


@pytest.mark.parametrize("era", ERAS)
def test_a_models_era_is_seen_in_its_tensors(era):
    shapes = {name: tuple(tensor.shape) for name, tensor in noisy_model(era).state_dict().items()}
    twins = ("2026-01-17", "2026-03-02")  # nothing but the softcap tells them apart
    assert eras_with(shapes) == (twins if era in twins else (era,))


# era: rotary base, table precision, softcap, q/k scale, gate scale and channels, short window
TABLE = """
2026-01-05  1e4  bf16     15  1     -  -   -
2026-01-11  1e4  bf16     15  1     -  -   1024
2026-01-17  1e4  bf16     15  1     2  32  1024
2026-03-02  1e4  bf16     20  1     2  32  1024
2026-03-09  1e5  compute  15  1.15  3  12  768
2026-03-14  1e5  compute  15  1.2   3  12  512
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line[:10])
def test_an_eras_constants_are_nanochats(line):
    era, base, tables, softcap, scale, gate, channels, short = line.split()
    found = numerics("bf16", era=era)
    assert (found.rotary_base, found.rotary_precision) == (float(base), tables)
    assert (found.softcap, found.qk_scale) == (float(softcap), float(scale))
    if gate != "-":
        assert (found.gate_scale, found.gate_channels) == (float(gate), int(channels))
    assert ERAS[era].value_embeds == (gate != "-")
    if short == "-":
        with pytest.raises(ConfigError, match="the era 2026-01-05 has no short windows"):
            windows_of("SSSL", 4, 2048, era=era)
        assert windows_of("L", 2, 2048, era=era) == (2048, 2048)
    else:
        width = int(short)
        assert windows_of("SSSL", 6, 2048, era=era) == (width, width, width, 2048, width, 2048)
