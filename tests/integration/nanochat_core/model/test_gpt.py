"""The forward pass against its formulas in float64, and what training relies on."""

import dataclasses
import math

import pytest
import torch

from nanochat_core.eras import ERAS, HEAD, numerics, of_era, windows_of
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import model_for_depth, num_lm_head_params, num_matrix_params, num_params
from tests.support.nanochat_core.random_gpt import randomise, shape_of
from tests.support.nanochat_core.train.recipe_reference import logits_of

pytestmark = pytest.mark.torch

CONFIG = shape_of(5, 7, 31, 2, 32, vocab_size=100)
FP32 = numerics("fp32")


def noisy_model(config=CONFIG, constants=FP32):
    """Every parameter random, so that nothing hides behind a zero projection."""
    return randomise(GPT(config, constants), seed=2, std=0.15)


def tokens_of(rows, length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (rows, length), generator=generator)


def test_losses_and_gradients_are_those_of_the_logits():
    model = noisy_model()
    tokens, targets = tokens_of(3, 20), tokens_of(3, 20, seed=4)
    targets[0, 5:] = -1
    targets[2] = -1
    weights = torch.rand(3, 20, generator=torch.Generator().manual_seed(5))
    plain = torch.nn.functional.cross_entropy(
        model(tokens).transpose(1, 2), targets, ignore_index=-1, reduction="none"
    )
    (plain * weights).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    losses = model.token_losses(tokens, targets)
    (losses * weights).sum().backward()
    torch.testing.assert_close(losses, plain, atol=2e-6, rtol=0)
    assert torch.equal(losses == 0, targets == -1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=2e-5, rtol=1e-4, msg=name)


def test_a_batch_without_targets_has_zero_loss_and_gradients():
    model = noisy_model()
    losses = model.token_losses(tokens_of(2, 8), torch.full((2, 8), -1))
    losses.sum().backward()
    assert torch.equal(losses, torch.zeros(2, 8))
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_initial_weights_follow_the_recipe():
    config = dataclasses.replace(CONFIG, width=128, vocab_size=2000, num_kv_heads=4)
    with torch.device("meta"):
        model = GPT(config, FP32)
    model.to_empty(device="cpu")
    model.init_weights(42)
    p = {name: parameter.detach() for name, parameter in model.named_parameters()}
    bound = math.sqrt(3 / 128)
    assert p["transformer.wte.weight"].std() == pytest.approx(0.8, rel=0.02)
    assert p["lm_head.weight"].std() == pytest.approx(0.001, rel=0.02)
    uniform = [(f"transformer.h.3.attn.c_{x}.weight", bound) for x in "qkv"]
    uniform += [("transformer.h.1.mlp.c_fc.weight", 0.4 * bound), ("value_embeds.4.weight", bound)]
    for name, edge in uniform:
        assert 0.98 * edge < p[name].max() <= edge
        assert -edge <= p[name].min() < -0.98 * edge
        assert p[name].std() == pytest.approx(edge / math.sqrt(3), rel=0.03)
    for name in ("transformer.h.0.attn.ve_gate.weight", "smear_gate.weight"):
        assert 0 <= p[name].min() < p[name].max() <= 0.02
    for name in ("transformer.h.0.attn.c_proj.weight", "transformer.h.0.mlp.c_proj.weight"):
        assert not p[name].any()
    torch.testing.assert_close(p["resid_lambdas"], torch.tensor([1.15, 1.125, 1.1, 1.075, 1.05]))
    torch.testing.assert_close(p["x0_lambdas"], torch.tensor([0.2, 0.1625, 0.125, 0.0875, 0.05]))
    assert float(p["smear_lambda"]) == 0.0
    assert float(p["backout_lambda"]) == pytest.approx(0.2)


def test_initial_weights_depend_on_the_seed_alone():
    torch.manual_seed(0)
    one, two, other = GPT(CONFIG, FP32), GPT(CONFIG, FP32), GPT(CONFIG, FP32)
    one.init_weights(42)
    torch.randn(5)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)  # drawn by so many threads
    try:
        two.init_weights(42)
    finally:
        torch.set_num_threads(threads)
    other.init_weights(43)
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name]), name
    name = "transformer.h.0.attn.c_q.weight"
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    layers = [one.state_dict()[f"transformer.h.{i}.attn.c_q.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_rows_longer_than_the_rotary_table_grow_it():
    config = dataclasses.replace(CONFIG, sequence_len=2, windows=(1, 1, 1, 1, 2))
    model, other = noisy_model(config), noisy_model(config)
    tokens = tokens_of(1, 30)
    model(tokens[:, :8])
    torch.testing.assert_close(model(tokens), other(tokens), atol=0, rtol=0)


def test_a_model_is_allocated_without_what_imports_sympy(monkeypatch):
    """That import takes longer than all else between torch's and a job's first step."""

    def fail(*args, **kwargs):
        raise AssertionError("of a meta tensor this imports torch's symbolic shapes")

    with torch.device("meta"):
        model = GPT(CONFIG, FP32)
    monkeypatch.setattr(torch, "empty_like", fail)
    model.to_empty(device="cpu").init_weights(1)
    assert all(parameter.requires_grad for parameter in model.parameters())


# Every era of nanochat's model is the same class with other settings.

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


def model_of(era):
    return randomise(GPT(config_of(era), numerics("fp32", era=era)), seed=2)


@pytest.mark.parametrize("era", ERAS)
def test_the_forward_pass_of_every_era_is_its_recipe(era):
    model, tokens = model_of(era), tokens_of(1, 32)
    expected = logits_of(model, tokens)
    assert model(tokens).dtype == torch.float32
    assert expected.std() > 0.5
    torch.testing.assert_close(model(tokens).detach().double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("era", ERAS)
def test_a_model_has_the_parameters_of_its_era_and_no_others(era):
    names = set(model_of(era).state_dict())
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
