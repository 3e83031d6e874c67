"""The kernels refuse counts that do not fit the arrays, before anything is read."""

import dataclasses

import pytest
import torch

from nanochat_core.engine.native import weights
from nanochat_core.errors import ConfigError, ModelError
from tests.support.nanochat_core.engine.engine_case import needs_kernels
from tests.support.nanochat_core.engine.native_models import make_gpt, make_runner

pytestmark = [pytest.mark.torch, needs_kernels]

SPOILT = {
    "smear reads beyond its gate": lambda r: setattr(r._spec, "smear_channels", 25),
    "smear reads beyond the width": lambda r: setattr(r._spec, "smear_channels", 65),
    "more tokens than rows": lambda r: setattr(r._spec, "vocab", 10_000),
    "more layers than matrices": lambda r: setattr(r._spec.layers[1].qkv, "panels", 1),
    "deeper matrices": lambda r: setattr(r._spec.layers[2].mlp_out, "steps", 10**6),
    "no matrix": lambda r: setattr(r._spec.layers[0].fc, "data", None),
    "heads that share no key": lambda r: setattr(r._spec, "num_kv_heads", 3),
    "wider heads": lambda r: setattr(r._spec, "head_width", 64),
    "negative width": lambda r: setattr(r._spec, "width", -64),
    "longer texts": lambda r: setattr(r._spec, "table_width", 10**6),
    "more slots": lambda r: setattr(r._spec, "num_slots", 10**6),
    "a group too many": lambda r: setattr(r._spec.layers[0], "group", 2),
    "a layer beyond its page": lambda r: setattr(r._spec.layers[0], "index", 3),
    "a negative window": lambda r: setattr(r._spec.layers[0], "window", -1),
    "a middle beyond the last": lambda r: setattr(r._spec, "middle_layer", 4),
    "an unknown form": lambda r: setattr(r._spec, "form", 3),
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_kernels_refuse_counts_that_do_not_fit(name, precision):
    runner = make_runner(make_gpt(), precision=precision, num_threads=1)
    SPOILT[name](runner)
    with pytest.raises(ModelError, match="the kernels refuse them"):
        runner._open()


def test_parameters_of_another_shape_or_dtype_are_refused_before_they_are_packed():
    for name, made in (
        ("smear_gate.weight", torch.zeros(1, 8)),
        ("resid_lambdas", torch.zeros(3)),
        ("lm_head.weight", torch.zeros(128, 64, dtype=torch.float64)),
    ):
        model = make_gpt()
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(made))
        with pytest.raises(ModelError, match=name):
            weights.check_parameters(model)


def test_a_gate_reads_no_more_channels_than_there_are():
    model = make_gpt()
    for name in ("smear_channels", "gate_channels"):
        numerics = dataclasses.replace(model.numerics, **{name: 65})
        with pytest.raises(ConfigError, match=f"numerics.{name} 65 is more than model.width 64"):
            type(model)(model.config, numerics)
