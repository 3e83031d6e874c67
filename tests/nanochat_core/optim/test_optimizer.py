"""The optimizer as a whole: which rule a parameter gets, and state that can be carried on."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanochat_core.config import ModelConfig, OptimizerConfig
from nanochat_core.errors import ModelError
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.groups import adamw_groups, group_of
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.distributed import ALONE
from nanochat_core.scaling import numerics, run_for_depth

pytestmark = pytest.mark.torch

CONFIG = ModelConfig(
    depth=3,
    width=32,
    num_heads=2,
    num_kv_heads=2,
    sequence_len=16,
    vocab_size=60,
    windows=(4, 4, 16),
    residual_scalars=True,
    value_embeds=True,
    smear=True,
    backout=True,
)
RATES = run_for_depth(12).optimizer
# a rate by which each group can be told
RATE_OF = {
    "lm_head_lr": 1,
    "embedding_lr": 2,
    "value_embed_lr": 3,
    "residual_lr": 4,
    "x0_lr": 5,
    "smear_lr": 6,
}


def make_model(precision: str = "fp32") -> GPT:
    model = GPT(CONFIG, numerics(precision))
    model.init_weights(1)
    return model


def train(model: GPT, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(60, (2, 17), generator=generator)
        model.token_losses(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        optimizer.step(lr_multiplier=1 / (step + 1), momentum=0.9, weight_decay=0.1)


def test_each_parameter_has_one_rule() -> None:
    groups = adamw_groups(dataclasses.replace(RATES, **RATE_OF))
    rules = {name: group_of(name, groups) for name, _ in make_model().named_parameters()}
    assert all(name.startswith("transformer.h.") for name, rule in rules.items() if rule is None)
    constants = {
        name: (rule.lr, rule.beta1, rule.beta2, rule.weight_decay)
        for name, rule in rules.items()
        if rule is not None
    }
    assert constants == {
        "lm_head.weight": (1, 0.8, 0.96, 0.01),
        "transformer.wte.weight": (2, 0.8, 0.995, 0.001),
        "value_embeds.0.weight": (3, 0.8, 0.995, 0.01),
        "value_embeds.2.weight": (3, 0.8, 0.995, 0.01),
        "resid_lambdas": (4, 0.8, 0.95, 0.05),
        "x0_lambdas": (5, 0.96, 0.95, 0.0),
        "smear_gate.weight": (6, 0.8, 0.95, 0.0),
        "smear_lambda": (6, 0.8, 0.95, 0.0),
        "backout_lambda": (6, 0.8, 0.95, 0.0),
    }


@pytest.mark.parametrize(
    ("rate", "moved"),
    [
        ("muon_lr", "transformer.h."),
        ("lm_head_lr", "lm_head.weight"),
        ("embedding_lr", "transformer.wte.weight"),
        ("value_embed_lr", "value_embeds."),
        ("residual_lr", "resid_lambdas"),
        ("x0_lr", "x0_lambdas"),
        ("smear_lr", ("smear_", "backout_lambda")),
    ],
)
def test_a_learning_rate_moves_its_parameters_only(rate: str, moved: str | tuple[str, ...]) -> None:
    names = [field.name for field in dataclasses.fields(OptimizerConfig)]
    still = {name: 0.0 for name in names if name.endswith("_lr")}
    model = make_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(
        model,
        dataclasses.replace(run_for_depth(12).optimizer, **(still | {rate: 0.1})),
        precision="fp32",
        world=ALONE,
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith(moved), name


def test_a_step_consumes_the_gradients() -> None:
    model = make_model()
    optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
    train(model, optimizer, range(1))
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(AssertionError, match="gradient"):
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_going_on_from_saved_state_equals_never_stopping(precision: str, tmp_path: Path) -> None:
    straight, stopped = make_model(precision), make_model(precision)
    train(straight, Optimizer(straight, RATES, precision=precision, world=ALONE), range(6))

    first = Optimizer(stopped, RATES, precision=precision, world=ALONE)
    train(stopped, first, range(3))
    save_file(first.gather(), tmp_path / "state.safetensors")
    stopped = make_model(precision)
    second = Optimizer(stopped, RATES, precision=precision, world=ALONE)
    second.load(load_file(tmp_path / "state.safetensors").__getitem__)
    train(stopped, second, range(3, 6))
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, stopped.state_dict()[name]), name


def test_state_is_keyed_by_parameter() -> None:
    model = make_model("bf16")
    state = Optimizer(model, RATES, precision="bf16", world=ALONE).pieces()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes["step"] == ()
    assert shapes["momentum/transformer.h.0.mlp.c_fc.weight"] == (128, 32)
    assert shapes["second_moment/transformer.h.0.mlp.c_fc.weight"] == (128, 1)
    assert shapes["second_moment/transformer.h.0.mlp.c_proj.weight"] == (1, 128)
    assert state["exp_avg/transformer.wte.weight"].dtype == torch.bfloat16
    assert state["exp_avg_sq/lm_head.weight"].dtype == torch.float32
    assert state["weight/lm_head.weight"].dtype == torch.float32
    assert len(state) == 1 + 3 * len(list(model.parameters()))


def test_state_that_does_not_fit_is_refused() -> None:
    optimizer = Optimizer(make_model(), RATES, precision="fp32", world=ALONE)
    state = optimizer.gather()
    with pytest.raises(ModelError, match="x0_lambdas has shape"):
        optimizer.load((state | {"exp_avg/x0_lambdas": torch.zeros(7)}).__getitem__)
    wrong = {"momentum/transformer.h.1.attn.c_q.weight": torch.zeros(32, 31)}
    with pytest.raises(ModelError, match=r"c_q.weight has shape .*needs \(32, 32\)"):
        optimizer.load((state | wrong).__getitem__)
