"""Lookups whose gradient is sorted, against plain ones."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from nanochat_core.model.layers import SortedLookup, table_gradient

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_repeated_tokens_is_that_of_a_plain_lookup(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (3, 40), generator=generator)  # each row some six times
    tokens[0] = 7
    grad = torch.randn(3, 40, 8, generator=generator).to(dtype)
    plain = torch.randn(32, 8, generator=generator).to(dtype).requires_grad_()
    sorted_ = plain.detach().clone().requires_grad_()
    expected = F.embedding(tokens, plain)
    got = SortedLookup.apply(tokens, sorted_)
    assert torch.equal(got, expected)
    expected.backward(grad)
    got.backward(grad)
    assert torch.equal(sorted_.grad, plain.grad)
    exact = torch.zeros(32, 8).double().index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05 * exact.abs().max().item()}[dtype]
    torch.testing.assert_close(sorted_.grad.double(), exact, atol=bound, rtol=0)
    assert not sorted_.grad[20:].any()


def test_the_operator_keeps_torchs_rules_for_its_like() -> None:
    grad, tokens = torch.randn(2, 5, 8), torch.randint(4, (2, 5))
    torch.library.opcheck(
        table_gradient, (grad, tokens, 4), test_utils=("test_schema", "test_faketensor")
    )


@pytest.fixture
def strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_a_strict_gpu_gives_the_same_bits_every_time(strict: None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    tokens = torch.randint(50, (8, 2048), device="cuda")
    grad = torch.randn(8, 2048, 256, device="cuda")
    first = table_gradient(grad, tokens, 64)
    for _ in range(5):
        assert torch.equal(table_gradient(grad, tokens, 64), first)
    expected = torch.zeros(64, 256, dtype=torch.float64, device="cuda")
    expected.index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    torch.testing.assert_close(first.double(), expected, atol=1e-3, rtol=1e-4)
