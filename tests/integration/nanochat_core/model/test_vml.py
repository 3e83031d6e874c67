"""MKL's vector functions are called by one thread before several threads call them together."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat_core.model.gpt import GPT
from nanochat_core.model.native.kernels import load as native_loss
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.device import VML, choose_vml_kernels
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import model_for_depth, numerics, optimizer_for
from tests.support.nanochat_core.optim.ranks import add_gradients

pytestmark = pytest.mark.torch

MODEL = model_for_depth(1, sequence_len=128, vocab_size=256)
OPTIMIZER = optimizer_for(MODEL, tokens=1, reference_tokens=1, total_batch_size=256)
# aten/src/ATen/cpu/vml.h and UnaryOpsKernel.cpp of torch 2.13: every function that may be VML's.
MAY_BE_VML = {
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma"),
    *("log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh"),
}


class Calls(TorchDispatchMode):
    """Records (function, elements) of every call of one of these functions, in order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        if name in MAY_BE_VML:
            self.found.append((name, args[0].numel()))
        return func(*args, **kwargs or {})


def test_a_training_step_calls_no_vector_function_that_the_model_did_not_call_first():
    choose_vml_kernels.cache_clear()
    with Calls() as calls:
        model = GPT(MODEL, numerics("fp32"))
        first = list(calls.found)
        model.init_weights(1)
        optimizer = Optimizer(model, OPTIMIZER, precision="fp32", world=ALONE)
        tokens = torch.arange(2 * 129).view(2, 129) % 256
        add_gradients(model, optimizer, tokens, torch.ones_like(tokens), device_batch_size=2)
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.0)
    assert sorted(first) == sorted((function.__name__, 1) for function in VML for _ in "fp")
    of_step = {name for name, elements in calls.found[len(first) :] if elements > 1}
    assert {"cos", "sin"} <= of_step  # or the record would be empty
    assert "exp" in of_step or native_loss() is not None  # the compiled loss calls no exp of torch
    assert of_step <= {name for name, _ in first}


def test_a_model_without_memory_calls_them_too():
    choose_vml_kernels.cache_clear()
    with torch.device("meta"):
        GPT(MODEL, numerics("fp32"))
    assert choose_vml_kernels.cache_info().currsize == 1
