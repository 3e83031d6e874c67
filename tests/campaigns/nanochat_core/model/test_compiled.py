"""Passes through torch.compile against eager ones. Slow: the kernels are made by a C++ compiler."""

import shutil

import pytest
import torch

from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import numerics
from tests.support.nanochat_core.random_gpt import shape_of

CONFIG = shape_of(20, 50, 160, width=128, num_heads=2, num_kv_heads=1, vocab_size=256)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own
]


def model_of(precision):
    model = GPT(CONFIG, numerics(precision))
    model.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


# Bounds of the difference as a share of the norm. In fp8 the roundings that fusion leaves out tip
# values to their neighbours, an eighth away; evaluation runs in bf16 then.
@pytest.mark.parametrize(
    ("precision", "of_gradient", "of_logits"),
    [("fp32", 1e-5, 1e-5), ("bf16", 0.05, 0.02), ("fp8", 0.25, 0.02)],
)
@pytest.mark.parametrize("by_block", [False, True], ids=["whole", "by block"])
def test_compiled_passes_are_eager_ones_without_a_graph_break(
    precision, of_gradient, of_logits, by_block
):
    tokens = torch.randint(256, (2, 161), generator=torch.Generator().manual_seed(3))
    eager, compiled = model_of(precision), model_of(precision)
    torch._dynamo.utils.counters.clear()
    compiled.compile_passes(by_block=by_block)
    for model in (eager, compiled):
        model.summed_loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, a), b in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        if a.numel() > 1000:  # the gradient of a scalar is a sum that nearly cancels
            assert (a.grad - b.grad).float().norm() <= of_gradient * a.grad.float().norm(), name
    with torch.no_grad():
        a, b = eager.eval()(tokens), compiled.eval()(tokens)
    assert (a - b).norm() <= of_logits * a.norm()
    assert not torch._dynamo.utils.counters["graph_break"]
