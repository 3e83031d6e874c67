"""What torch.compile compiles of a model, and how often."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from nanochat_core.config import ModelConfig
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import numerics

pytestmark = pytest.mark.torch
CONFIG = ModelConfig(
    depth=2,
    width=128,
    num_heads=2,
    num_kv_heads=2,
    sequence_len=32,
    vocab_size=256,
    windows=(8, 32),
)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call")  # of a mask that is kept
def test_passes_of_one_shape_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tracing alone shows it: generating code would take most of the time.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = GPT(CONFIG, numerics("fp32"))
    model.init_weights(1)
    model.compile_passes()
    tokens = torch.randint(CONFIG.vocab_size, (2, 17))
    torch._dynamo.reset()
    counters.clear()
    for _ in range(3):
        with torch.no_grad():
            model.summed_loss(tokens[:, :-1], tokens[:, 1:])
    assert counters["stats"]["unique_graphs"] == 1
    for _ in range(3):
        model.summed_loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()
