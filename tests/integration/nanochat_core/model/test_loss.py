"""The one-pass loss and its gradients against cross-entropy written out in float64."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model import loss as module
from nanochat_core.model.gradient_sum import GradientSum, unit_gradient
from nanochat_core.model.loss import softcap_loss, softcap_losses
from nanochat_core.model.native import kernels

pytestmark = pytest.mark.torch

SOFTCAP = 15.0
N, C, V = 700, 72, 2500  # more than one block of rows, and a last chunk of columns that is short
REASON = kernels.LIBRARY.unable_here()
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compute the loss; on a GPU, or on this CPU with `rows` as on a GPU."""

    of_hidden: torch.dtype = FP32
    of_weight: torch.dtype = FP32
    rows: int | None = None
    compiled: bool = False
    device: str = "cpu"

    @property
    def error(self):
        """Return the largest error of a gradient, as a share of its norm."""
        return 3e-6 if self.of_weight == FP32 else 0.01

    def inputs(self, spread):
        hidden, weight, *rest = inputs(spread)
        hidden, weight = hidden.to(self.of_weight).to(self.of_hidden), weight.to(self.of_weight)
        return [tensor.to(self.device) for tensor in (hidden, weight, *rest)]


NARROW = {"of_hidden": BF16, "of_weight": BF16}
ON_CPU = {
    "chunks": Way(),
    "chunks in bf16": Way(**NARROW),
    "one block of rows": Way(rows=N),
    "one block of rows in bf16": Way(rows=N, **NARROW),
    "blocks of rows": Way(rows=99),
    "blocks of rows in bf16": Way(rows=99, **NARROW),
}
COMPILED = {"kernels": Way(compiled=True), "kernels in bf16": Way(compiled=True, of_weight=BF16)}
ON_GPU = {"a GPU, one block": N, "a GPU, blocks": 99}
needs_kernels = pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}")
WAYS = [
    *(pytest.param(way, id=name) for name, way in ON_CPU.items()),
    *(pytest.param(way, id=name, marks=needs_kernels) for name, way in COMPILED.items()),
    *(
        pytest.param(Way(rows=rows, device="cuda", **NARROW), id=name, marks=pytest.mark.gpu)
        for name, rows in ON_GPU.items()
    ),
]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    way = request.param
    if way.rows is not None:
        monkeypatch.setattr(module, "_walk", module._walk_rows)
        monkeypatch.setattr(module, "GPU_ROWS", way.rows)
        monkeypatch.setattr(module, "GPU_SHARE", 0)
    if not way.compiled:
        monkeypatch.setattr(kernels, "load", lambda: None)
    threads = torch.get_num_threads()
    yield way
    torch.set_num_threads(threads)


def inputs(spread=0.5):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, C, generator=generator)
    weight = spread * torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[:3] = torch.tensor([0, V - 1, module.CPU_COLUMNS])  # the edges of chunks
    scale = torch.randn(N, generator=generator)
    return hidden, weight, targets, scale


def reference(hidden, weight, targets, dtype=FP32):
    """Return the losses in float64. In bf16 logits are rounded; the gradient is taken there."""
    z = hidden.double() @ weight.double().T
    if dtype == BF16:
        z = z + (z.to(dtype).double() - z).detach()
    logits = SOFTCAP * torch.tanh(z / SOFTCAP)
    return F.cross_entropy(logits, targets, reduction="none")


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("spread", [0.001, 0.5, 3.0], ids=["first-step", "trained", "capped"])
def test_losses_and_gradients_of_the_sum_are_those_of_float64(way, spread):
    hidden, weight, targets, scale = way.inputs(spread)
    exact = leaves(hidden.double(), weight.double())
    losses = reference(*exact, targets, way.of_weight)
    (losses * scale).sum().backward()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        one, each = leaves(hidden, weight), leaves(hidden, weight)
        total = softcap_loss(*one, targets, scale, softcap=SOFTCAP)
        total.backward()
        of_tokens = softcap_losses(*each, targets, softcap=SOFTCAP)
        (of_tokens * scale).sum().backward()
        for leaf, other, want in zip(one, each, exact, strict=True):
            assert torch.equal(leaf.grad, other.grad)
            assert leaf.grad.dtype == leaf.dtype
            assert (leaf.grad.double() - want.grad).norm() <= way.error * want.grad.norm()
        of_tokens = of_tokens.detach()
        near = 1e-6 if way.of_weight == FP32 else 0.003
        torch.testing.assert_close(of_tokens.double(), losses.detach(), rtol=near, atol=near)
        assert total.item() == pytest.approx(of_tokens.dot(scale).item(), rel=1e-6, abs=1e-3)
        found.append([of_tokens, *(leaf.grad for leaf in each)])
    if way.compiled and way.of_weight == FP32:  # no sum is divided among threads
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_confident_token_has_a_small_gradient_not_none(way):
    hidden, weight = torch.ones(1, 64), torch.full((64, 64), -0.02)
    weight[2] = 0.12  # a probability of 0.998, which bf16 would round to 1
    hidden, weight = (
        t.to(way.device) for t in (hidden.to(way.of_hidden), weight.to(way.of_weight))
    )
    targets, scale = torch.tensor([2], device=way.device), torch.ones(1, device=way.device)
    (found,) = leaves(weight)
    softcap_loss(hidden, found, targets, scale, softcap=SOFTCAP).backward()
    (exact,) = leaves(weight.double())
    reference(hidden, exact, targets, way.of_weight).sum().backward()
    rtol = 1e-3 if way.of_weight == FP32 else 0.02
    torch.testing.assert_close(found.grad.double(), exact.grad, rtol=rtol, atol=0)


def test_the_weights_gradient_is_added_to_the_optimizers_sum_without_rounding(way):
    hidden, weight, targets, scale = way.inputs(0.1)
    (exact,) = leaves(weight.double())
    (reference(hidden, exact, targets, way.of_weight) * scale).sum().backward()
    rows, plain = leaves(hidden, weight)
    softcap_loss(rows, plain, targets, scale, softcap=SOFTCAP).backward()
    total, holds = torch.full((V, C), torch.nan, device=way.device), [False, True, True]
    added = []
    adding = GradientSum(hidden.device, lambda: (total, holds[len(added)]), added.append)
    for factor in (1, 2):  # a multiple of the loss adds as much more
        (h,) = leaves(hidden)
        loss = softcap_loss(h, plain, targets, scale, softcap=SOFTCAP, gradient_sum=adding)
        gradient = unit_gradient(h.device) if factor == 1 else None
        (loss if factor == 1 else factor * loss).backward(gradient)
        assert torch.equal(h.grad, factor * rows.grad)
        assert len(added) == factor
        error = (total.double() / (1 if factor == 1 else 3) - exact.grad).norm()
        assert error <= way.error * exact.grad.norm()
        if factor == 1:  # its error is no larger than that of a gradient in the weight's dtype
            assert error <= 1.02 * (plain.grad.double() - exact.grad).norm()


def test_in_bf16_the_gradient_does_not_add_up_in_bf16_over_chunks_of_the_vocabulary(monkeypatch):
    size = 8 * module.CPU_COLUMNS
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, 64, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(size, 64, generator=generator)).bfloat16()
    targets, scale = torch.randint(size, (64,), generator=generator), torch.ones(64)
    exact = hidden.double().requires_grad_()
    reference(exact, weight, targets).sum().backward()
    errors = {}
    for columns in (module.CPU_COLUMNS, size):
        monkeypatch.setattr(module, "CPU_COLUMNS", columns)
        (narrow,) = leaves(hidden)
        softcap_loss(narrow, weight, targets, scale, softcap=SOFTCAP).backward()
        errors[columns] = ((narrow.grad.double() - exact.grad).norm() / exact.grad.norm()).item()
    in_chunks, at_once = errors.values()
    assert at_once < 0.004
    assert in_chunks < 1.5 * at_once  # each product and their sum are rounded once


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_kernels), False])
def test_no_token_to_learn_from_costs_nothing(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernels, "load", lambda: None)
    hidden, weight, targets, scale = inputs()
    h, w = leaves(hidden[:0], weight)
    total = softcap_loss(h, w, targets[:0], scale[:0], softcap=SOFTCAP)
    total.backward()
    assert total.item() == 0
    assert not w.grad.any()


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Records (operation, elements of its result) of every operation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen.append((function, result.numel() if isinstance(result, Tensor) else 0))
        return result


def test_no_more_than_a_block_of_logits_is_alive(monkeypatch):
    monkeypatch.setattr(kernels, "load", lambda: None)
    hidden, weight, targets, scale = inputs()
    with Watch() as watch:
        softcap_loss(*leaves(hidden, weight), targets, scale, softcap=SOFTCAP).backward()
    largest = max(size for _, size in watch.seen)
    assert largest <= max(module.CPU_ROWS * module.CPU_COLUMNS, weight.numel())


def test_a_backward_pass_that_begins_with_the_optimizers_1_multiplies_nothing():
    hidden, weight, targets, scale = inputs()
    results = []
    one = unit_gradient(hidden.device)
    for gradient in (one, one.clone()):
        found = leaves(hidden, weight)
        loss = softcap_loss(*found, targets, scale, softcap=SOFTCAP)
        with Watch() as watch:
            loss.backward(gradient)
        results.append([leaf.grad for leaf in found])
        products = [function for function, _ in watch.seen if function is torch.ops.aten.mul.Tensor]
        assert len(products) == (0 if gradient is one else 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_would_overflow_or_write_elsewhere_is_our_bug():
    hidden, weight, targets, scale = inputs()
    with pytest.raises(AssertionError):
        softcap_loss(hidden, weight, targets, scale, softcap=31.0)
    if REASON is None:
        with pytest.raises(AssertionError):
            kernels.loss(hidden, weight, targets + 1, None, SOFTCAP)
