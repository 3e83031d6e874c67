"""Tests of the QK kernel in Triton's interpreter, on a CPU.

The interpreter has to be chosen before the kernel is imported: test_added_gradients.py runs this
file in a process of its own, with TRITON_INTERPRET=1.
"""

from functools import partial

import pytest
import torch

from nanochat_core.model import attention, qk_kernel
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import run_for_depth
from tests.support.nanochat_core.random_gpt import randomise

CPU = torch.device("cpu")


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_output_and_gradient_are_torchs(head_dim: int, transposed: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 13, 3, head_dim, requires_grad=True)  # 78 heads: the last program is cut off
    angles = torch.rand(1, 13, 1, head_dim // 2)
    rotary = angles.cos(), angles.sin()
    grad = torch.randn_like(x)
    if transposed:  # as SDPA gives it
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for call in (qk_kernel.rotate_normalise, qk_kernel.in_torch):
        out = call(x, *rotary, 1e-5, 1.2)
        found.append((out, *torch.autograd.grad(out, x, grad)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_in_bf16_its_error_is_that_of_rounding() -> None:
    assert qk_kernel.error(CPU, 64) < 0.01  # the interpreter cuts bf16 off, which rounds a bit more


def test_a_model_trains_with_it_as_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_for_depth(2, precision="fp32", sequence_len=16, vocab_size=265)
    model = randomise(GPT(run.model, run.numerics), 1, 0.1).train()
    tokens = torch.randint(265, (2, 12), generator=torch.Generator().manual_seed(1))
    calls = []

    def kernel(*args):
        calls.append(args[0].shape)
        return qk_kernel.rotate_normalise(*args)

    def gradients() -> list[torch.Tensor]:
        loss = model.summed_loss(tokens, tokens.roll(-1, 1))
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    with_torch = gradients()
    monkeypatch.setattr(attention, "_qk_kernel", kernel)
    with_kernel = gradients()
    assert len(calls) == 4  # q and k of two layers
    compare = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(with_kernel, with_torch, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            compare(ours, theirs)
