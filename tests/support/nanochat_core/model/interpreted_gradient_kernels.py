"""Tests of the kernels that sum gradients of matrices and of tables, in Triton's interpreter.

The interpreter has to be chosen before the kernels are imported: test_added_gradients.py runs this
file in a process of its own, with TRITON_INTERPRET=1.
"""

from functools import partial

import pytest
import torch
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

from nanochat_core.model.matrices import kernel as matrix_kernel
from nanochat_core.model.tables import gradient, kernel

ROWS = 20  # of a table
BLOCK = 4  # few tokens are enough then, and the interpreter is slow


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Tiles and blocks are small. Kernels may loop over a `range` of computed numbers, which numpy
    2.4 no longer converts."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(matrix_kernel, "TILE", (16, 32, 16))
    monkeypatch.setattr(matrix_kernel, "PROGRAMS", 7)
    monkeypatch.setattr(matrix_kernel, "ROWS", 8)
    monkeypatch.setattr(kernel, "BLOCK", BLOCK)


def factors(outputs, inputs, tokens):
    """Return numbers that bf16 holds, in fp32: the interpreter's `dot` takes bf16 for integers."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((tokens, outputs), (tokens, inputs))
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


@pytest.mark.parametrize("programs", [1, 3, 7, 64])  # of several tiles each, and of a part of one
@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(32, 64, 80), (40, 48, 50), (16, 96, 9)])
def test_sums_of_a_matrix_are_those_of_float64(programs, outputs, inputs, tokens, monkeypatch):
    monkeypatch.setattr(matrix_kernel, "PROGRAMS", programs)
    grad, x = factors(outputs, inputs, tokens)
    expected = grad.double().T @ x.double()
    total = torch.full((outputs, inputs), torch.nan)
    for count in (1, 2):
        matrix_kernel.add(grad, x, total, holds=count == 2)
        torch.testing.assert_close(total.double(), count * expected, atol=count * 1e-4, rtol=1e-5)


def tokens_of(kind, count=30):
    generator = torch.Generator().manual_seed(1)
    if kind == "uniform":
        return torch.randint(ROWS, (count,), generator=generator)
    if kind == "text":  # Zipf: one token is a quarter of all, many rows have none
        frequent = 1 / torch.arange(1, ROWS + 1)
        return torch.multinomial(frequent, count, replacement=True, generator=generator)
    if kind == "one":
        return torch.full((count,), ROWS - 1)
    return torch.arange(ROWS).repeat_interleave(BLOCK)[: 6 * BLOCK]  # rows end with the blocks


def gradients_of(tokens, channels=64):
    return torch.randn(len(tokens), channels, generator=torch.Generator().manual_seed(2))


def add(tokens, grad, total, *, holds=True):
    kernel.add(grad, *gradient.sort(tokens, ROWS), total, holds=holds)


@pytest.mark.parametrize("kind", ["uniform", "text", "one", "aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_a_table_are_those_of_float64(kind, dtype):
    tokens = tokens_of(kind)
    grad = gradients_of(tokens).to(dtype)
    total = torch.full((ROWS, 64), torch.nan)
    add(tokens, grad, total, holds=False)
    expected = torch.zeros(ROWS, 64).double().index_add_(0, tokens, grad.double())
    # A sum of n numbers of at most m rounds by at most n * m * 2^-24 each time.
    most = len(tokens) ** 0.5 * 2**-22 * grad.abs().max().item() * 4
    torch.testing.assert_close(total.double(), expected, atol=most, rtol=0)
    untouched = torch.ones(ROWS, dtype=torch.bool)
    untouched[tokens] = False
    assert not total[untouched].any()
    add(tokens, grad, total)
    torch.testing.assert_close(total.double(), 2 * expected, atol=3 * most, rtol=0)
    assert not total[untouched].any()


@pytest.mark.parametrize("channels", [640, 768, 1536])
def test_a_wide_table_has_several_programs_a_row(channels):
    tokens = tokens_of("text", 10)
    grad, total = gradients_of(tokens, channels).bfloat16(), torch.ones(ROWS, channels)
    add(tokens, grad, total)
    expected = torch.ones(ROWS, channels).double().index_add_(0, tokens, grad.double())
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["matrix", "text", "one"])
def test_programs_in_any_order_give_the_same_bits(kind, monkeypatch):
    found = []
    for order in (list, reversed, shuffled):
        # The interpreter runs the programs of a grid in a loop over `range`.
        monkeypatch.setattr(interpreter, "range", partial(in_order, order), raising=False)
        total = torch.ones((32, 64) if kind == "matrix" else (ROWS, 64))
        if kind == "matrix":
            matrix_kernel.add(*factors(32, 64, 80), total, holds=True)
        else:
            add(tokens_of(kind), gradients_of(tokens_of(kind)), total)
        found.append(total)
    assert all(torch.equal(found[0], other) for other in found[1:])


def in_order(order, *numbers):
    ids = range(*numbers)
    return order(ids) if len(numbers) == 1 and len(ids) >= ROWS // 4 else ids  # not a kernel's own


def shuffled(ids):
    return [ids[i] for i in torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))]
