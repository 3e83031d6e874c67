"""The one-pass loss and its gradients against cross-entropy written out in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model import loss as module
from nanochat_core.model.gradient_sum import GradientSum, unit_gradient
from nanochat_core.model.loss import softcap_loss, softcap_losses

pytestmark = pytest.mark.torch

SOFTCAP = 15.0
N, C, V = 700, 32, 2500  # more than one block of rows, and a last chunk of columns that is short


def inputs(spread=0.5):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, C, generator=generator)
    weight = spread * torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[:3] = torch.tensor([0, V - 1, module.CPU_COLUMNS])  # the edges of chunks
    scale = torch.randn(N, generator=generator)
    return hidden, weight, targets, scale


def reference(hidden, weight, targets):
    logits = SOFTCAP * torch.tanh(hidden.double() @ weight.double().T / SOFTCAP)
    return F.cross_entropy(logits, targets, reduction="none")


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("spread", [0.001, 0.5, 3.0], ids=["first-step", "trained", "capped"])
def test_losses_and_gradients_of_the_sum_are_those_of_float64(spread):
    hidden, weight, targets, scale = inputs(spread)
    expected_leaves = leaves(hidden.double(), weight.double())
    losses = reference(*expected_leaves, targets)
    (losses * scale).sum().backward()
    h, w = leaves(hidden, weight)
    total = softcap_loss(h, w, targets, scale, softcap=SOFTCAP)
    (3 * total).backward()
    torch.testing.assert_close(
        softcap_losses(hidden, weight, targets, softcap=SOFTCAP).double(),
        losses.detach(),
        rtol=1e-6,
        atol=1e-6,
    )
    assert total.item() == pytest.approx((losses * scale).sum().item(), rel=1e-6, abs=1e-3)
    for got, leaf in zip((h, w), expected_leaves, strict=True):
        bound = 3e-6 * leaf.grad.abs().max().item()
        torch.testing.assert_close(got.grad.double() / 3, leaf.grad, rtol=0, atol=bound)


def test_losses_one_by_one_take_any_gradient_and_agree_with_the_sum():
    hidden, weight, targets, scale = inputs()
    one, two = leaves(hidden, weight), leaves(hidden, weight)
    softcap_loss(*one, targets, scale, softcap=SOFTCAP).backward()
    (softcap_losses(*two, targets, softcap=SOFTCAP) * scale).sum().backward()
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_confident_token_has_a_small_gradient_not_none_in_bf16():
    hidden = torch.ones(1, 16, dtype=torch.bfloat16)
    weight = torch.zeros(4, 16, dtype=torch.bfloat16)
    weight[2] = 0.5  # logit 7.3: probability 0.998, which bf16 would round to 1
    weight.requires_grad_()
    target, scale = torch.tensor([2]), torch.ones(1)
    softcap_loss(hidden, weight, target, scale, softcap=SOFTCAP).backward()
    exact = weight.detach().double().requires_grad_()
    reference(hidden, exact, target).sum().backward()
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=0.02, atol=0)


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


def test_no_token_to_learn_from_costs_nothing():
    hidden, weight, targets, scale = inputs()
    h, w = leaves(hidden[:0], weight)
    total = softcap_loss(h, w, targets[:0], scale[:0], softcap=SOFTCAP)
    total.backward()
    assert total.item() == 0
    assert not w.grad.any()


def test_no_more_than_a_block_of_logits_is_alive():
    hidden, weight, targets, scale = inputs()
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    with Watch():
        softcap_loss(*leaves(hidden, weight), targets, scale, softcap=SOFTCAP).backward()
    assert max(sizes) <= max(module.CPU_ROWS * module.CPU_COLUMNS, weight.numel())


@pytest.fixture
def by_rows(monkeypatch):
    """Compute on this CPU as on a GPU."""
    monkeypatch.setattr(module, "_walk", module._walk_rows)
    return monkeypatch


@pytest.mark.parametrize("rows", [N, 99], ids=["one block", "blocks"])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 3e-6), (torch.bfloat16, 0.01)], ids=["fp32", "bf16"]
)
def test_blocks_of_whole_rows_give_the_losses_and_gradients_of_float64(rows, dtype, error, by_rows):
    by_rows.setattr(module, "GPU_ROWS", rows)
    hidden, weight, targets, scale = inputs(0.1)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    expected_leaves = leaves(hidden.double(), weight.double())
    losses = reference(*expected_leaves, targets)
    (losses * scale).sum().backward()
    found = leaves(hidden, weight)
    total = softcap_loss(*found, targets, scale, softcap=SOFTCAP)
    total.backward()
    assert total.item() == pytest.approx((losses * scale).sum().item(), abs=300 * error)
    for got, leaf in zip(found, expected_leaves, strict=True):
        assert got.grad.dtype == dtype
        assert (got.grad.double() - leaf.grad).norm() < error * leaf.grad.norm()
    again = leaves(hidden, weight)
    (softcap_losses(*again, targets, softcap=SOFTCAP) * scale).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(again, found, strict=True))


def test_a_backward_pass_that_begins_with_the_optimizers_1_multiplies_nothing():
    hidden, weight, targets, scale = inputs()
    results, products = [], []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mul.Tensor:
                products.append(args[0].shape)
            return function(*args, **(kwargs or {}))

    one = unit_gradient(hidden.device)
    for gradient in (one, one.clone()):
        found = leaves(hidden, weight)
        loss = softcap_loss(*found, targets, scale, softcap=SOFTCAP)
        with Watch():
            loss.backward(gradient)
        results.append([leaf.grad for leaf in found])
        assert len(products) == (0 if gradient is one else 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rows", [N, 99], ids=["one block", "blocks"])
def test_the_weights_gradient_is_added_to_the_optimizers_sum_without_rounding(rows, by_rows):
    by_rows.setattr(module, "GPU_ROWS", rows)
    hidden, weight, targets, scale = inputs(0.1)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    (plain,) = leaves(weight)
    softcap_loss(hidden, plain, targets, scale, softcap=SOFTCAP).backward()
    total, holds, added = torch.full((V, C), torch.nan), [False, True, True], []
    adding = GradientSum(hidden.device, lambda: (total, holds[len(added)]), added.append)
    for factor in (1, 2):  # a multiple of the loss adds as much more
        (h,) = leaves(hidden)
        loss = softcap_loss(h, plain, targets, scale, softcap=SOFTCAP, gradient_sum=adding)
        gradient = unit_gradient(h.device) if factor == 1 else None
        (loss if factor == 1 else factor * loss).backward(gradient)
        assert h.grad is not None
        assert len(added) == factor
    torch.testing.assert_close(total, 3 * plain.grad.float(), rtol=0.01, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 768])
def test_on_a_gpu_one_block_and_several_agree_and_add_to_a_sum_in_fp32(width, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4096, width, generator=generator).to("cuda", torch.bfloat16)
    weight = (0.05 * torch.randn(8192, width, generator=generator)).to("cuda", torch.bfloat16)
    targets = torch.randint(8192, (4096,), generator=generator).cuda()
    scale = torch.full((4096,), 1 / 4096, device="cuda")
    exact = leaves(hidden.double(), weight.double())
    (reference(*exact, targets) * scale).sum().backward()
    total = torch.zeros(8192, width, device="cuda")
    found = []
    monkeypatch.setattr(module, "GPU_SHARE", 0)
    for rows in (4096, 1024):
        monkeypatch.setattr(module, "GPU_ROWS", rows)
        one = leaves(hidden, weight)
        softcap_loss(*one, targets, scale, softcap=SOFTCAP).backward()
        adding = GradientSum(hidden.device, lambda: (total, True), lambda _: None)
        (h,) = leaves(hidden)
        total.zero_()
        loss = softcap_loss(h, weight, targets, scale, softcap=SOFTCAP, gradient_sum=adding)
        loss.backward(unit_gradient(h.device))
        assert torch.equal(h.grad, one[0].grad)
        for got, want in zip(
            (one[0].grad, one[1].grad, total), (exact[0], exact[1], exact[1]), strict=True
        ):
            assert (got.double() - want.grad).norm() < 0.01 * want.grad.norm()
        # The sum was not rounded to bf16: its error is no larger.
        assert (total - exact[1].grad).norm() <= 1.02 * (one[1].grad - exact[1].grad).norm()
        found.append((one[0].grad, total.clone()))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < 0.004 * b.float().norm()


def test_a_softcap_that_could_overflow_is_our_bug():
    hidden, weight, targets, scale = inputs()
    with pytest.raises(AssertionError):
        softcap_loss(hidden, weight, targets, scale, softcap=31.0)
