"""Tests of the kernels of a table's gradient in Triton's interpreter, on a CPU.

The interpreter has to be chosen before the kernels are imported: test_qk_kernel.py runs this
file in a process of its own, with TRITON_INTERPRET=1.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

from nanochat_core.model.tables import gradient, kernel

ROWS = 20
BLOCK = 4  # few tokens are enough then, and the interpreter is slow


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", BLOCK)


def tokens_of(kind: str, count: int = 30) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "uniform":
        return torch.randint(ROWS, (count,), generator=generator)
    if kind == "text":  # Zipf: one token is a quarter of all, many rows have none
        frequent = 1 / torch.arange(1, ROWS + 1)
        return torch.multinomial(frequent, count, replacement=True, generator=generator)
    if kind == "one":
        return torch.full((count,), ROWS - 1)
    return torch.arange(ROWS).repeat_interleave(BLOCK)[: 6 * BLOCK]  # rows end with the blocks


def exact(tokens: Tensor, grad: Tensor, before: Tensor) -> Tensor:
    return before.double().index_add_(0, tokens, grad.double())


def add(tokens: Tensor, grad: Tensor, total: Tensor, *, holds: bool) -> None:
    kernel.add(grad, *gradient.sort(tokens, ROWS), total, holds=holds)


@pytest.mark.parametrize("kind", ["uniform", "text", "one", "aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [64])
def test_sums_are_those_of_float64(kind: str, dtype: torch.dtype, channels: int) -> None:
    tokens = tokens_of(kind)
    grad = torch.randn(len(tokens), channels, generator=torch.Generator().manual_seed(2)).to(dtype)
    total = torch.full((ROWS, channels), torch.nan)
    add(tokens, grad, total, holds=False)
    expected = exact(tokens, grad, torch.zeros(ROWS, channels))
    # A sum of n numbers of at most m rounds by at most n * m * 2^-24 each time.
    most = len(tokens) ** 0.5 * 2**-22 * grad.abs().max().item() * 4
    torch.testing.assert_close(total.double(), expected, atol=most, rtol=0)
    untouched = torch.ones(ROWS, dtype=torch.bool)
    untouched[tokens] = False
    assert not total[untouched].any()
    before = total.clone()
    add(tokens, grad, total, holds=True)
    torch.testing.assert_close(total.double(), 2 * expected, atol=3 * most, rtol=0)
    assert torch.equal(total[untouched], before[untouched])


@pytest.mark.parametrize("channels", [640, 768, 1536])
def test_a_wide_table_has_several_programs_a_row(channels: int) -> None:
    tokens = tokens_of("text", 10)
    grad = torch.randn(len(tokens), channels, generator=torch.Generator().manual_seed(2)).bfloat16()
    total = torch.ones(ROWS, channels)
    add(tokens, grad, total, holds=True)
    expected = exact(tokens, grad, torch.ones(ROWS, channels))
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["text", "one"])
def test_programs_in_any_order_give_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(kind)
    grad = torch.randn(len(tokens), 64, generator=torch.Generator().manual_seed(2))
    found = []
    for order in (list, reversed, shuffled):
        # The interpreter runs the programs of a grid in a loop over `range`.
        monkeypatch.setattr(interpreter, "range", partial(in_order, order), raising=False)
        total = torch.ones(ROWS, 64)
        add(tokens, grad, total, holds=True)
        found.append(total)
    assert all(torch.equal(found[0], other) for other in found[1:])


def in_order(order: Callable[[range], Iterable[int]], *numbers: int) -> Iterable[int]:
    ids = range(*numbers)
    return order(ids) if len(ids) >= ROWS // 4 else ids


def shuffled(ids: range) -> list[int]:
    return [ids[i] for i in torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]


def test_no_program_adds_more_than_a_block_of_gradients_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row of all tokens is summed by as many programs as there are blocks."""
    calls: list[tuple[Any, Any]] = []
    monkeypatch.setattr(kernel, "sum_pieces", Recorder(kernel.sum_pieces, calls))
    tokens = tokens_of("one", 30)
    grad = torch.ones(30, 64)
    total = torch.zeros(ROWS, 64)
    add(tokens, grad, total, holds=True)
    assert total[ROWS - 1].eq(30).all()
    (grid, pieces) = calls[0]
    assert grid == (-(-30 // BLOCK), 1)
    counts = [BLOCK] * (30 // BLOCK - 1) + [30 % BLOCK]
    assert pieces[1:, 0].tolist() == counts


class Recorder:
    """Launches a kernel and keeps its grid and its output."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, Any]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.kernel[grid](*args, **options)
            self.calls.append((grid, args[-1]))

        return launch
