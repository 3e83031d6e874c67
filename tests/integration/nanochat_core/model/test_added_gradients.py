"""Gradients of matrices and tables that a backward pass adds to sums, and Triton's kernels."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.our_train import make_job
from nanochat_core.errors import ConfigError
from nanochat_core.model import attention
from nanochat_core.model.gradient_sum import GradientSum, Weighted
from nanochat_core.model.layers import Embedding, Linear
from nanochat_core.model.matrices import gradient as matrix_gradient
from nanochat_core.model.tables import gradient as table_gradient
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.train import pretrain
from tests.support.nanochat_core.interpreted import check_interpreted, needs_triton
from tests.support.nanochat_core.optim.ranks import (
    RATES,
    adding_lookups,
    gradients_of,
    make_model,
)

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def adding(monkeypatch):
    """A CPU adds the gradients of matrices and tables to their sums, as a GPU does; also small
    matrices'."""
    monkeypatch.setattr(matrix_gradient, "DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(matrix_gradient, "MIN_SIDE", 16)
    with adding_lookups():
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A module, its input and the gradient of its output, and that of its weight in float64."""

    module: Weighted
    given: Tensor
    grad: Tensor
    exact: Tensor

    def sum_gradients(self, *, holds: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Give the module a sum; return it, and the list of what it reports when it has added."""
        total, calls = torch.full_like(self.exact, torch.nan, dtype=torch.float32), []
        if holds:
            total.zero_()
        into = GradientSum(total.device, lambda: (total, holds or bool(calls)), calls.append)
        self.module.gradient_sum = into
        return total, calls


def matrix(outputs: int = 48, inputs: int = 32, repeats: int = 1, device: str = "cpu") -> Case:
    generator = torch.Generator(device).manual_seed(1)
    grad, x = (
        torch.randn(2, 40, side, device=device, generator=generator)
        .bfloat16()
        .repeat(1, repeats, 1)
        for side in (outputs, inputs)
    )
    module = Linear(inputs, outputs).to(device)
    module.dtype = torch.bfloat16
    torch.nn.init.normal_(module.weight)
    exact = grad.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    return Case(module=module, given=x.requires_grad_(), grad=grad, exact=exact)


def table(
    dtype: torch.dtype,
    channels: int = 8,
    kind: str = "uniform",
    shape: tuple[int, ...] = (3, 40),  # each of 20 rows some six times
    rows: int = 20,
    device: str = "cpu",
) -> Case:
    frequent = {"uniform": torch.ones(rows), "text": 1 / torch.arange(1, rows + 1.0)}
    frequent["one"] = F.one_hot(torch.tensor(rows - 1)).float()
    generator = torch.Generator().manual_seed(1)
    count = math.prod(shape)
    drawn = torch.multinomial(frequent[kind], count, replacement=True, generator=generator)
    tokens = drawn.view(shape).to(device)
    grad = torch.randn(*shape, channels, generator=generator).to(device, dtype)
    module = Embedding(rows + 12, channels, dtype).to(device)
    torch.nn.init.normal_(module.weight)
    exact = torch.zeros(module.weight.shape, device=device).double()
    exact.index_add_(0, tokens.flatten(), grad.flatten(0, -2).double())
    return Case(module=module, given=tokens, grad=grad, exact=exact)


CASES = {
    "matrix": matrix,
    "table in fp32": partial(table, torch.float32),
    "table in bf16": partial(table, torch.bfloat16),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@every_case
def test_outputs_and_gradients_are_those_of_autograd(make: Callable[..., Case]):
    case = make()
    expected = case.module(case.given)
    expected.backward(case.grad)
    of_input, case.given.grad, case.module.weight.grad = case.given.grad, None, None
    total, calls = case.sum_gradients()
    for count in (1, 2):
        found = case.module(case.given)
        found.backward(case.grad)
        assert torch.equal(found, expected)
        assert of_input is None or torch.equal(case.given.grad, count * of_input)
        assert len(calls) == count
        torch.testing.assert_close(total.double(), count * case.exact, atol=1e-4, rtol=1e-5)
    assert case.module.weight.grad is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "make",
    [
        *(
            partial(matrix, *sides, repeats=100)
            for sides in ((768, 768), (640, 2560), (6144, 1536))
        ),
        *(
            partial(table, torch.bfloat16, channels, kind, shape=(16384,), rows=1000)
            for kind in ("uniform", "text", "one")
            for channels in (64, 640, 1536)
        ),
    ],
)
def test_a_gpu_adds_what_float64_adds_and_the_same_bits_every_time(make: Callable[..., Case]):
    case, found = make(device="cuda"), []
    for _ in range(3):
        total, _ = case.sum_gradients()
        for _ in range(2):
            case.module(case.given).backward(case.grad)
        found.append(total)
    assert all(torch.equal(total, found[0]) for total in found)
    error = (found[0] - 2 * case.exact).abs().max() / (2 * case.exact).abs().max()
    assert error < 1e-5


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@every_case
def test_a_compiled_pass_is_one_graph_that_adds_once_and_sorts_once(make: Callable[..., Case]):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def count(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    cases = [make() for _ in range(3)]
    totals = [case.sum_gradients(holds=True)[0] for case in cases]
    given = cases[0].given.detach()

    def loss():
        return torch.stack([(k + 1) * c.module(given) for k, c in enumerate(cases)]).square().sum()

    loss().backward()
    expected = [total.clone() for total in totals]
    # The partition that inductor takes; it merges equal operations.
    divide = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=divide)
    torch.compile(loss, backend=backend, fullgraph=True)().backward()
    assert len(graphs) == 2
    is_table = given.dtype == torch.int64
    assert sum(graph["aten.sort.stable"] for graph in graphs) == is_table
    operator = "add_lookup_gradient" if is_table else "add_weight_gradient"
    assert graphs[1][f"nanochat_flows.{operator}.default"] == 3
    assert all(case.module.weight.grad is None for case in cases)
    for total, once in zip(totals, expected, strict=True):
        assert once.any()
        torch.testing.assert_close(total, 2 * once)


# Matrices.


def test_only_large_matrices_in_bf16_add_by_themselves(monkeypatch):
    monkeypatch.setattr(matrix_gradient, "MIN_SIDE", 128)
    x, weight = torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(256, 128)
    assert matrix_gradient.adds(x, weight)
    assert not matrix_gradient.adds(x.float(), weight)
    assert not matrix_gradient.adds(x, weight[:120])
    assert not matrix_gradient.adds(x, weight[:130])  # rows of 260 bytes: none of 16
    monkeypatch.setattr(matrix_gradient, "DEVICES", {"cuda"})
    assert not matrix_gradient.adds(x, weight)


def passes(optimizer, model):
    """Run two micro-steps; return the matrices' gradients."""
    tokens = torch.randint(60, (4, 16), generator=torch.Generator().manual_seed(1))
    for last in (False, True):
        loss = model.summed_loss(tokens, tokens.roll(1), 1 / 64)
        optimizer.backward(loss, last=last)
    return {name: t for name, t in gradients_of(optimizer).items() if t.ndim == 2}


def test_an_optimizer_sums_and_steps_as_with_autograds_gradients(monkeypatch):
    additions = mock.Mock(side_effect=matrix_gradient.add_in_torch)
    monkeypatch.setattr(matrix_gradient, "add_in_torch", additions)
    model = make_model("bf16")
    optimizer = Optimizer(model, RATES, precision="bf16", world=ALONE)
    found = passes(optimizer, model)
    matrices = [n for n in found if n.startswith("transformer.h") and "gate" not in n]
    assert additions.call_count == 2 * len(matrices) == 2 * 6 * 3
    monkeypatch.setattr(matrix_gradient, "DEVICES", set())
    plain = make_model("bf16")
    expected = passes(Optimizer(plain, RATES, precision="bf16", world=ALONE), plain)
    assert additions.call_count == 2 * len(matrices)
    assert found.keys() == expected.keys()
    for name in matrices:  # autograd's were rounded to bf16 in each micro-step
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert 0 < error < 2**-8, name
    optimizer.start_reduce_scatter()
    optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)
    assert not gradients_of(optimizer)


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
    monkeypatch.setattr(matrix_gradient, "find_spec", lambda _: "triton's")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    monkeypatch.setattr(matrix_gradient, "error", lambda _: error)
    expected = nullcontext() if fault is None else pytest.raises(ConfigError, match=fault)
    with expected:
        matrix_gradient.choose_weight_kernel(True, torch.device("cuda"), precision)
    chosen = set() if fault else {"cuda"}
    assert chosen == matrix_gradient.DEVICES


# Tables.


def test_tokens_are_sorted_and_stay_in_order_within_a_row():
    tokens = torch.tensor([[3, 1, 3], [0, 3, 1]])
    for rows in (5, 40_000):
        ordered, order, starts = table_gradient.sort(tokens, rows)
        assert ordered.tolist() == [0, 1, 1, 3, 3, 3]
        assert order.tolist() == [3, 1, 5, 0, 2, 4]
        assert starts.tolist() == [0, 1, 3, 3, 6, *[6] * (rows - 4)]
    assert table_gradient.sort(torch.tensor([32_767]), 2**15)[0].tolist() == [32_767]


def test_value_embeddings_share_a_sort_also_where_nothing_is_compiled(monkeypatch):
    """The embedding of the tokens sorts by itself."""
    sort = mock.Mock(side_effect=table_gradient.sort)
    monkeypatch.setattr(table_gradient, "sort", sort)
    tokens = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(1))
    model = make_model()
    optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
    optimizer.backward(model.summed_loss(tokens, tokens.roll(1)), last=True)
    assert [rows for (_, rows), _ in sort.call_args_list] == [64, 64]
    with torch.no_grad():
        model.summed_loss(tokens, tokens.roll(1))
    assert sort.call_count == 2


# Triton's kernels of training: in its interpreter, and refused where they cannot run.

CASE = {
    **{"depth": 1, "precision": "fp32", "sequence_len": 16, "vocab_size": 265, "threads": 1},
    **{"rows": 1, "accumulate": 1, "device": "cpu", "attention": "auto", "compile": False},
}


@needs_triton
@pytest.mark.parametrize("file", ["qk_kernel", "gradient_kernels"])
def test_the_interpreted_kernels_compute_what_torch_computes(file):
    check_interpreted(f"model/interpreted_{file}.py")


@pytest.mark.parametrize("kernel", ["QK", "weight"])
def test_without_a_gpu_training_with_it_ends_with_the_reason(tmp_path, kernel, monkeypatch):
    monkeypatch.setattr(matrix_gradient, "DEVICES", set())
    setting = f"{kernel.lower()}_kernel"
    job = make_job(CASE, tmp_path, num_steps=1, **{setting: True})
    reason = f"the {kernel} kernel cannot run here: it needs a GPU"
    with pytest.raises(ConfigError, match=reason) as raised:
        pretrain.run(job)
    assert raised.value.hint == f"--place {setting}=false"
    assert attention._qk_kernel is None
    assert not matrix_gradient.DEVICES


@pytest.mark.gpu
def test_a_gpu_computes_what_torch_computes():
    attention.choose_qk_kernel(True, torch.device("cuda"), 128)
    try:
        assert attention._qk_kernel is not None
    finally:
        attention.choose_qk_kernel(False, torch.device("cuda"), 128)
