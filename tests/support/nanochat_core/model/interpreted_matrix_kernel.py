"""Tests of the kernels of a matrix's gradient in Triton's interpreter, on a CPU.

The interpreter has to be chosen before the kernels are imported: test_qk_kernel.py runs this
file in a process of its own, with TRITON_INTERPRET=1.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

from nanochat_core.model.matrices import kernel

TILE = (16, 32, 16)  # small, since the interpreter is slow


@pytest.fixture(autouse=True)
def ranges_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels loop over a `range` of computed numbers, which numpy 2.4 no longer converts."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def factors(outputs: int, inputs: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return numbers that bf16 holds, in fp32: the interpreter's `dot` takes bf16 for integers."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(tokens, outputs, generator=generator).bfloat16().float(),
        torch.randn(tokens, inputs, generator=generator).bfloat16().float(),
    )


def patch(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(kernel, "TILE", TILE)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    monkeypatch.setattr(kernel, "ROWS", 8)


@pytest.mark.parametrize("programs", [1, 3, 7, 64])  # of several tiles each, and of a part of one
@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(32, 64, 80), (40, 48, 50), (16, 96, 9)])
def test_sums_are_those_of_float64(
    programs: int, outputs: int, inputs: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, programs)
    grad, x = factors(outputs, inputs, tokens)
    expected = grad.double().T @ x.double()
    total = torch.full((outputs, inputs), torch.nan)
    kernel.add(grad, x, total, holds=False)
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)
    kernel.add(grad, x, total, holds=True)
    torch.testing.assert_close(total.double(), 2 * expected, atol=2e-4, rtol=1e-5)


def test_programs_in_any_order_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, 7)
    grad, x = factors(32, 64, 80)
    found = []
    for order in (list, reversed):
        # The interpreter runs the programs of a grid in a loop over `range`.
        monkeypatch.setattr(interpreter, "range", partial(in_order, order), raising=False)
        total = torch.ones(32, 64)
        kernel.add(grad, x, total, holds=True)
        found.append(total)
    assert torch.equal(*found)


def in_order(order: type, *numbers: int) -> Iterable[int]:
    return order(range(*numbers)) if len(numbers) == 1 else range(*numbers)  # not a kernel's own
