"""Every era of nanochat's model is the same class with other settings."""

import dataclasses
import math

import pytest
import torch

from nanochat_core.config import ModelConfig, NumericsConfig
from nanochat_core.engine.engine import Engine
from nanochat_core.engine.reference import generate_naive
from nanochat_core.eras import ERAS, HEAD, eras_with, numerics, of_era, windows_of
from nanochat_core.errors import ConfigError, ModelError
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import model_for_depth, num_matrix_params, num_params, run_for_depth
from nanochat_core.scaling_january import january_model
from nanochat_core.tokenizer.bpe import Tokenizer
from tests.support.nanochat_core.random_gpt import randomise

pytestmark = pytest.mark.torch

FIRST = "2026-01-05"
SHAPE = ModelConfig(
    depth=4,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    sequence_len=32,
    vocab_size=300,
    windows=(32, 32, 32, 32),
)
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


def january_logits(weights, tokens):
    """The first era's logits of one row in float64: (T,) -> (T, V). Nothing of ours but numbers."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    length, heads, dim = len(tokens), 4, 16

    def norm(x):
        return x / ((x * x).mean(dim=-1, keepdim=True) + 2.0**-23).sqrt()

    angles = torch.arange(length).float()[:, None] * 1e4 ** (-torch.arange(0, dim, 2).float() / dim)
    cos, sin = angles.cos().bfloat16().double(), angles.sin().bfloat16().double()
    x = norm(w["transformer.wte.weight"][tokens])
    for i in range(4):
        at = f"transformer.h.{i}."
        h = norm(x)
        q, k, v = (h @ w[f"{at}attn.c_{name}.weight"].T for name in "qkv")
        mixed = []
        for head in range(heads):
            mine = slice(head * dim, (head + 1) * dim)
            shared = slice(head // 2 * dim, (head // 2 + 1) * dim)
            turned = []
            for z in (q[:, mine], k[:, shared]):
                a, b = z[:, : dim // 2], z[:, dim // 2 :]
                turned.append(norm(torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)))
            scores = turned[0] @ turned[1].T / math.sqrt(dim)
            scores = scores.masked_fill(torch.ones(length, length).triu(1) == 1, -math.inf)
            mixed.append(scores.softmax(dim=-1) @ v[:, shared])
        x = x + torch.cat(mixed, dim=-1) @ w[f"{at}attn.c_proj.weight"].T
        inner = (norm(x) @ w[f"{at}mlp.c_fc.weight"].T).clamp(min=0) ** 2
        x = x + inner @ w[f"{at}mlp.c_proj.weight"].T
    z = (norm(x) @ w["lm_head.weight"].T)[:, : SHAPE.vocab_size]
    return 15 * torch.tanh(z / 15)


def test_the_first_eras_forward_pass_is_its_recipe():
    model = noisy_model(FIRST)
    tokens = tokens_of(1, 32)
    expected = january_logits(dict(model.state_dict()), tokens[0])
    assert expected.std() > 0.5
    torch.testing.assert_close(model(tokens)[0].detach().double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("era", ERAS)
def test_a_model_has_the_parameters_of_its_era_and_no_others(era):
    names = set(noisy_model(era).state_dict())
    row = ERAS[era]
    for part, of_part in PARTS.items():
        assert names & of_part == (of_part if getattr(row, part) else set()), part
    assert len(names) == 2 + 6 * 4 + sum(len(PARTS[p]) for p in PARTS if getattr(row, p))


@pytest.mark.parametrize("era", ERAS)
def test_counted_parameters_are_the_models_own_in_every_era(era):
    config = of_era(model_for_depth(7), era, pattern="L")
    constants = numerics("bf16", era=era)
    with torch.device("meta"):
        model = GPT(config, constants)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) == num_params(config, constants)
    inside = sum(size for name, size in sizes.items() if name.startswith("transformer.h."))
    assert inside == num_matrix_params(config, constants)


def test_januarys_d12_has_74_tensors():
    config = january_model(12, vocab_size=32768)
    with torch.device("meta"):
        model = GPT(config, numerics("bf16", era=FIRST))
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert (len(sizes), sum(sizes)) == (74, 135_266_304)


@pytest.mark.parametrize("era", ERAS)
def test_the_engine_answers_with_a_model_of_another_era(era):
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    shape = dataclasses.replace(config_of(era), vocab_size=265)
    model = noisy_model(era, shape=shape)
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    options = {"max_tokens": 12, "temperature": 1.0, "top_k": None}
    found = Engine(model, tokenizer).complete(prompts, num_samples=1, seeds=[3, 4], **options)
    for answers, prompt, seed in zip(found, prompts, (3, 4), strict=True):
        assert answers == [generate_naive(model, tokenizer, prompt, seed=seed, **options)]


JANUARYS = {"muon": "newton_schulz", "muon_weight_decay": 0.0, "grad_clip": 1.0}


@pytest.mark.parametrize(("era", "changes"), [(FIRST, JANUARYS), (HEAD, {})])
def test_a_model_overfits_one_batch(era, changes):
    model = GPT(config_of(era), numerics("fp32", era=era))
    model.init_weights(7)
    rates = dataclasses.replace(run_for_depth(12).optimizer, **changes)
    optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
    tokens = tokens_of(2, 33)
    losses = []
    for _ in range(30 if changes else 60):
        loss = model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.0)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(SHAPE.vocab_size), abs=0.05)
    assert losses[-1] < (0.5 if changes else 0.2)
    kept = any(key.startswith("second_moment/") for key in optimizer.pieces())
    assert kept == (era == HEAD)


@pytest.mark.parametrize("part", PARTS)
def test_an_absent_part_is_a_part_that_does_nothing(part):
    whole = noisy_model(HEAD)
    weights = whole.state_dict()
    idle = {"resid_lambdas": 1.0}  # every other one does nothing at 0
    with torch.no_grad():
        for name in PARTS[part]:
            weights[name].fill_(idle.get(name, 0.0))
    without = GPT(dataclasses.replace(whole.config, **{part: False}), whole.numerics)
    without.load_state_dict({n: w for n, w in weights.items() if n not in PARTS[part]})
    tokens = tokens_of(2, 32)
    assert torch.equal(whole(tokens), without(tokens))
    other = noisy_model(HEAD)
    assert not torch.equal(other(tokens), without(tokens))


# But those that only training in fp8 uses: see test_fp8.py.
CONSTANTS = [f.name for f in dataclasses.fields(NumericsConfig) if not f.name.startswith("fp8_")]


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_is_used(name):
    """Another value gives other logits, or other initial weights."""
    still = numerics("fp32")
    value = getattr(still, name)
    other = {"precision": "bf16", "rotary_precision": "bf16", "gate_channels": 7}
    other |= {"smear_channels": 5, "norm_eps": 1e-3}
    changed = dataclasses.replace(still, **{name: other.get(name) or value * 1.25})
    tokens = tokens_of(1, 32)
    seen = []
    for constants in (still, changed):
        model = GPT(SHAPE, constants)
        model.init_weights(1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += (0.1 * noise).to(parameter.dtype)
        seen.append(model(tokens))
    assert not torch.equal(*seen)


def test_the_first_era_begins_with_wider_embeddings_and_a_full_c_fc():
    config = dataclasses.replace(config_of(FIRST), width=128, vocab_size=2000)
    for era, std, share in ((FIRST, 1.0, 1.0), (HEAD, 0.8, 0.4)):
        model = GPT(config, numerics("fp32", era=era))
        model.init_weights(42)
        weights = model.state_dict()
        assert weights["transformer.wte.weight"].std() == pytest.approx(std, rel=0.02)
        edge = share * math.sqrt(3 / 128)
        assert weights["transformer.h.2.mlp.c_fc.weight"].abs().max() == pytest.approx(
            edge, rel=0.01
        )
        assert weights["lm_head.weight"].std() == pytest.approx(0.001, rel=0.02)


@pytest.mark.parametrize("era", ERAS)
def test_a_models_era_is_seen_in_its_tensors(era):
    shapes = {name: tuple(tensor.shape) for name, tensor in noisy_model(era).state_dict().items()}
    twins = ("2026-01-17", "2026-03-02")  # nothing but the softcap tells them apart
    assert eras_with(shapes) == (twins if era in twins else (era,))


def test_a_model_of_no_known_era_is_refused():
    shapes = {name: tuple(tensor.shape) for name, tensor in noisy_model(HEAD).state_dict().items()}
    with pytest.raises(ModelError, match="has bigram embeddings"):
        eras_with({**shapes, "bigram_embed.weight": (64, 64)})
    with pytest.raises(ModelError, match="of no era of nanochat that is known"):
        eras_with({n: s for n, s in shapes.items() if n != "resid_lambdas"})
    with pytest.raises(ConfigError, match="there is no era '2025-12-24'"):
        numerics("fp32", era="2025-12-24")


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


def test_a_window_pattern_is_short_and_long():
    assert windows_of("SL", 4, 256) == (128, 256, 128, 256)
    assert windows_of("S", 3, 256) == (128, 128, 256)
    for pattern in ("", "SXL", "sl"):
        with pytest.raises(ConfigError, match="the window pattern is"):
            windows_of(pattern, 4, 256)


@pytest.mark.parametrize(
    ("precision", "message"),
    [("fp16", "would lose small gradients: they need loss scaling"), ("tf32", "is 'tf32'")],
)
def test_a_precision_that_nothing_runs_in_is_refused(precision, message):
    with pytest.raises(ConfigError, match=message):
        numerics(precision)
    assert [numerics(p).precision for p in ("fp32", "bf16", "fp8")] == ["fp32", "bf16", "fp8"]


def test_todays_constants_leave_no_trace_in_an_identity():
    """Fields that came later have the value of the time before them: nothing is stale."""
    names = {"precision", "rotary_base", "rotary_precision", "qk_scale", "softcap", "gate_scale"}
    names |= {"gate_channels", "smear_channels", "norm_eps"}
    assert set(numerics("bf16").canonical()) == names
    first = numerics("bf16", era=FIRST).canonical()
    assert set(first) == names | {"init_embedding_std", "init_c_fc_bound"}
    assert not set(SHAPE.canonical()) & set(PARTS)
    assert set(config_of(FIRST).canonical()) >= set(PARTS)
