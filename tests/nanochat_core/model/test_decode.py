"""Decoding with a cache is the full forward pass, whatever rows share the batch."""

import pytest
import torch
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.model.gpt import GPT
from nanochat_core.model.kv_cache import KVCache
from nanochat_core.scaling import numerics

pytestmark = pytest.mark.torch

CONFIG = ModelConfig(
    depth=4,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    sequence_len=32,
    vocab_size=100,
    windows=(3, 6, 32, 32),
    residual_scalars=True,
    value_embeds=True,
    smear=True,
    backout=True,
)


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(CONFIG, numerics("fp32"))
    model.init_weights(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


def row(length: int, seed: int) -> Tensor:
    return torch.randint(100, (length,), generator=torch.Generator().manual_seed(seed))


def make_cache(num_rows: int, max_len: int = 40) -> KVCache:
    return KVCache(CONFIG, num_rows=num_rows, max_len=max_len, dtype=torch.float32, device="cpu")


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=99)
    return tokens, torch.tensor([len(tokens) for tokens in rows])


def check(model: GPT, logits: Tensor, rows: list[Tensor]) -> None:
    """Each row's logits are those of a forward pass over all the row's tokens so far."""
    expected = torch.stack([model(tokens.unsqueeze(0))[0, -1] for tokens in rows])
    torch.testing.assert_close(logits, expected.detach(), atol=1e-5, rtol=0)


def test_ragged_prompts_then_single_tokens(model: GPT) -> None:
    rows = [row(length, length) for length in (1, 17, 9, 4)]
    cache = make_cache(4)
    check(model, model.decode(*padded(rows), cache), rows)
    assert cache.lengths.tolist() == [1, 17, 9, 4]
    for step in range(8):
        new = row(4, 100 + step).unsqueeze(1)
        rows = [torch.cat(pair) for pair in zip(rows, new, strict=True)]
        check(model, model.decode(new, torch.ones(4, dtype=torch.int64), cache), rows)


def test_ragged_pieces_after_a_prefill(model: GPT) -> None:
    rows = [row(length, length) for length in (12, 3)]
    cache = make_cache(2)
    model.decode(*padded(rows), cache)
    for sizes in ((5, 1), (1, 9), (2, 2)):
        pieces = [row(size, 50 + size) for size in sizes]
        rows = [torch.cat(pair) for pair in zip(rows, pieces, strict=True)]
        check(model, model.decode(*padded(pieces), cache), rows)


def test_a_row_with_nothing_new_stays_as_it_is(model: GPT) -> None:
    rows = [row(6, 1), row(5, 2)]
    cache = make_cache(2)
    model.decode(*padded(rows), cache)
    model.decode(torch.tensor([[7], [8]]), torch.tensor([1, 0]), cache)
    assert cache.lengths.tolist() == [7, 5]
    logits = model.decode(torch.tensor([[9], [9]]), torch.tensor([1, 1]), cache)
    check(
        model,
        logits,
        [torch.cat([rows[0], torch.tensor([7, 9])]), torch.cat([rows[1], torch.tensor([9])])],
    )


def test_an_empty_row_may_wait_beside_others(model: GPT) -> None:
    cache = make_cache(2)
    model.decode(torch.tensor([[1, 2], [0, 0]]), torch.tensor([2, 0]), cache)
    logits = model.decode(torch.tensor([[3], [4]]), torch.tensor([1, 1]), cache)
    check(model, logits, [torch.tensor([1, 2, 3]), torch.tensor([4])])


def test_a_cache_can_be_filled_to_its_last_place_and_not_beyond(model: GPT) -> None:
    rows = [row(10, 1), row(2, 2)]
    cache = make_cache(2, max_len=10)
    check(model, model.decode(*padded(rows), cache), rows)
    pieces = [row(0, 3), row(8, 3)]
    logits = model.decode(*padded(pieces), cache)
    check(model, logits[1:], [torch.cat([rows[1], pieces[1]])])
    with pytest.raises(AssertionError, match="11 tokens do not fit a cache of 10"):
        model.decode(torch.tensor([[1], [1]]), torch.tensor([1, 1]), cache)


def test_a_reset_cache_remembers_nothing(model: GPT) -> None:
    cache = make_cache(2)
    model.decode(*padded([row(20, 1), row(15, 2)]), cache)
    cache.reset()
    rows = [row(4, 3), row(7, 4)]
    check(model, model.decode(*padded(rows), cache), rows)


def test_a_repeated_prompt_goes_on_in_several_ways(model: GPT) -> None:
    prompts = [row(8, 1), row(5, 2)]
    cache = make_cache(2)
    model.decode(*padded(prompts), cache)
    copies = cache.repeat(3)
    assert copies.num_rows == 6
    assert copies.lengths.tolist() == [8, 8, 8, 5, 5, 5]
    new = row(6, 3).unsqueeze(1)
    logits = model.decode(new, torch.ones(6, dtype=torch.int64), copies)
    check(model, logits, [torch.cat([prompts[i // 3], new[i]]) for i in range(6)])
    assert cache.lengths.tolist() == [8, 5]


def test_rows_can_be_dropped_and_reordered(model: GPT) -> None:
    rows = [row(length, length) for length in (4, 11, 6)]
    cache = make_cache(3)
    model.decode(*padded(rows), cache)
    kept = cache.keep(torch.tensor([2, 0]))
    new = torch.tensor([[5], [6]])
    logits = model.decode(new, torch.ones(2, dtype=torch.int64), kept)
    check(model, logits, [torch.cat([rows[2], new[0]]), torch.cat([rows[0], new[1]])])


def test_decoding_in_bf16_follows_the_forward_pass() -> None:
    narrow = GPT(CONFIG, numerics("bf16"))
    narrow.init_weights(3)
    with torch.no_grad():
        narrow.lm_head.weight.mul_(500)
    rows = [row(9, 1), row(5, 2)]
    cache = KVCache(CONFIG, num_rows=2, max_len=16, dtype=narrow.dtype, device="cpu")
    logits = narrow.decode(*padded(rows), cache)
    expected = torch.stack([narrow(tokens.unsqueeze(0))[0, -1] for tokens in rows]).detach()
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.std()
