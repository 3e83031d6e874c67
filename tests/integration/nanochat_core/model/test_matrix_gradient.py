"""The gradient of a matrix that a backward pass adds to its sum: on a CPU, on a GPU."""

import dataclasses
import math
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch

from nanochat_core.errors import ConfigError
from nanochat_core.model.gradient_sum import GradientSum
from nanochat_core.model.layers import Linear
from nanochat_core.model.matrices import gradient as matrix_gradient
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from tests.support.nanochat_core.optim.ranks import CONFIG, RATES, gradients_of, make_model

pytestmark = pytest.mark.torch


@pytest.fixture
def adding(monkeypatch):
    """A CPU adds the gradients of matrices to their sums, as a GPU does; also small matrices'."""
    monkeypatch.setattr(matrix_gradient, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(matrix_gradient, "MIN_SIDE", 16)


def factors(outputs=48, inputs=32, device="cpu"):
    generator = torch.Generator(device).manual_seed(1)
    return [
        torch.randn(2, 40, side, device=device, generator=generator).bfloat16()
        for side in (outputs, inputs)
    ]


def test_outputs_and_gradients_are_those_of_a_plain_linear_map(adding):
    grad, x = factors()
    linear = Linear(32, 48)
    linear.dtype = torch.bfloat16
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(2))
    plain, ours = (x.clone().requires_grad_() for _ in range(2))
    expected = linear(plain)
    expected.backward(grad)
    total, calls = torch.full((48, 32), torch.nan), []
    into = GradientSum(x.device, lambda: (total, bool(calls)), calls.append)
    linear.gradient_sum, linear.weight.grad = into, None
    exact = grad.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    for count in (1, 2):
        ours.grad = None
        found = linear(ours)
        found.backward(grad)
        assert torch.equal(found, expected)
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=0)
        assert len(calls) == count
        torch.testing.assert_close(total.double(), count * exact, atol=1e-4, rtol=1e-5)
    assert linear.weight.grad is None


def test_only_large_matrices_in_bf16_add_by_themselves(adding, monkeypatch):
    x, weight = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(256, 128)
    assert matrix_gradient.adds(x, weight)
    assert not matrix_gradient.adds(x.float(), weight)
    assert not matrix_gradient.adds(x, weight[:6])
    assert not matrix_gradient.adds(x, weight[:100])  # rows of 200 bytes: none of 16
    monkeypatch.setattr(matrix_gradient, "DEVICES", {"cuda"})
    assert not matrix_gradient.adds(x, weight)


def test_the_operator_keeps_torchs_rules_for_its_like():
    grad, x = factors()
    into = GradientSum(grad.device, lambda: (torch.zeros(48, 32), True), lambda proxy: None)
    torch.library.opcheck(
        matrix_gradient.add_weight_gradient,
        (grad, x, into.handle),
        test_utils=("test_schema", "test_faketensor"),
    )


def passes(optimizer, model):
    """Run two micro-steps; return the matrices' gradients."""
    tokens = torch.randint(60, (4, 16), generator=torch.Generator().manual_seed(1))
    for last in (False, True):
        loss = model.summed_loss(tokens, tokens.roll(1), 1 / 64)
        optimizer.backward(loss, last=last)
    return {name: t for name, t in gradients_of(optimizer).items() if t.ndim == 2}


def test_an_optimizer_sums_and_steps_as_with_autograds_gradients(adding, monkeypatch):
    model = make_model("bf16")
    optimizer = Optimizer(model, RATES, precision="bf16", world=ALONE)
    add = mock.Mock(side_effect=matrix_gradient.add_in_torch)
    monkeypatch.setattr(matrix_gradient, "add_in_torch", add)
    found = passes(optimizer, model)
    matrices = [n for n in found if n.startswith("transformer.h") and "gate" not in n]
    assert add.call_count == 2 * len(matrices) == 2 * 6 * 3
    monkeypatch.setattr(matrix_gradient, "DEVICES", set())
    plain = make_model("bf16")
    expected = passes(Optimizer(plain, RATES, precision="bf16", world=ALONE), plain)
    assert add.call_count == 2 * len(matrices)
    assert found.keys() == expected.keys()
    for name in matrices:  # autograd's were rounded to bf16 in each micro-step
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert 0 < error < 2**-8, name
    optimizer.start_reduce_scatter()
    optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)
    assert not gradients_of(optimizer)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_a_compiled_pass_is_one_graph_and_adds_once(adding):
    grad, x = factors()
    linear = Linear(32, 48)
    linear.dtype = torch.bfloat16
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(48, 32)
    linear.gradient_sum = GradientSum(x.device, lambda: (total, True), lambda _: None)
    leaf = x.requires_grad_()
    linear(leaf).backward(grad)
    expected = total.clone()
    assert expected.any()
    torch.compile(linear, backend="aot_eager", fullgraph=True)(leaf).backward(grad)
    torch.testing.assert_close(total, 2 * expected)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compiled_by_themselves_are_as_many_graphs_as_without(adding, monkeypatch):
    # Here: torch's compiler takes seconds to import.
    from torch._dynamo.backends.debugging import aot_eager

    same = {"windows": (16, 16, 16), "value_embeds": False, "smear": False, "backout": False}
    graphs = mock.Mock(side_effect=aot_eager)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    add = mock.Mock(side_effect=matrix_gradient.add_in_torch)
    monkeypatch.setattr(matrix_gradient, "add_in_torch", add)
    counts = []
    for devices in (set(), {"cpu"}):
        monkeypatch.setattr(matrix_gradient, "DEVICES", devices)
        torch._dynamo.reset()
        graphs.reset_mock()
        model = make_model("bf16", config=dataclasses.replace(CONFIG, **same))
        optimizer = Optimizer(model, RATES, precision="bf16", world=ALONE)
        model.compile_passes(by_block=True)
        passes(optimizer, model)
        counts.append(graphs.call_count)
    assert counts[0] == counts[1] < 3
    assert add.call_count == 2 * 6 * 3


@pytest.mark.parametrize(
    ("precision", "capability", "error", "fault"),
    [
        ("fp8", 9, 0.0, "it multiplies bf16, and the precision is fp8"),
        ("bf16", 8, 0.0, "it needs compute capability 9.0"),
        ("bf16", 9, 2e-3, "it differs from torch by 2.0e-03 of the largest value"),
        ("bf16", 9, math.nan, "it differs from torch by nan of the largest value"),
        ("bf16", 10, 9e-4, None),
    ],
)
def test_the_kernel_is_chosen_where_it_can_run(monkeypatch, precision, capability, error, fault):
    monkeypatch.setattr(matrix_gradient, "DEVICES", set())
    monkeypatch.setattr(matrix_gradient, "find_spec", lambda _: "triton's")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(matrix_gradient, "error", lambda _: error)
    expected = nullcontext() if fault is None else pytest.raises(ConfigError, match=fault)
    with expected:
        matrix_gradient.choose_weight_kernel(True, torch.device("cuda"), precision)
    chosen = set() if fault else {"cuda"}
    assert chosen == matrix_gradient.DEVICES


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(768, 768), (640, 2560), (6144, 1536)])
def test_a_gpu_adds_what_float64_adds_and_the_same_bits_every_time(outputs, inputs):
    matrix_gradient.choose_weight_kernel(True, torch.device("cuda"), "bf16")
    from nanochat_core.model.matrices.kernel import add

    try:
        grad, x = (t.flatten(0, 1) for t in factors(outputs, inputs, "cuda"))
        grad, x = (t.repeat(100, 1) for t in (grad, x))
        expected = 2 * (grad.double().T @ x.double())
        found = []
        for _ in range(3):
            total = torch.full((outputs, inputs), torch.nan, device="cuda")
            for holds in (False, True):
                add(grad, x, total, holds=holds)
            found.append(total)
        assert all(torch.equal(total, found[0]) for total in found)
        error = (found[0] - expected).abs().max() / expected.abs().max()
        assert error < 1e-5
    finally:
        matrix_gradient.choose_weight_kernel(False, torch.device("cuda"), "bf16")
