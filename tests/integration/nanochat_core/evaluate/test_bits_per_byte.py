import math

import pytest
import torch

from nanochat_core.data.row_files import Rows
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.runtime.hardware.distributed import ALONE

pytestmark = pytest.mark.torch


@pytest.fixture
def rows(rows_dir):
    return Rows.open(rows_dir, "val")


def straight_line(model, tokenizer, rows, num_rows):
    """Bits per byte, one target at a time in float64."""
    nats = num_bytes = 0.0
    for row in rows.ids[:num_rows].astype(int).tolist():
        logits = model(torch.tensor([row[:-1]]))[0].double()
        for position, target in enumerate(row[1:]):
            if target < tokenizer.vocab_size - 9:
                nats -= torch.log_softmax(logits[position], dim=-1)[target].item()
                num_bytes += len(tokenizer.decode_bytes([target]))
    return nats / math.log(2) / num_bytes


def measure(model, tokenizer, rows, *, num_tokens=7 * 32, batch_size=3):
    return bits_per_byte(
        model,
        rows,
        tokenizer.token_bytes(),
        num_tokens=num_tokens,
        batch_size=batch_size,
        world=ALONE,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "batch_size"),
    [(7 * 32, 7, 3), (10**9, 7, 100), (3 * 32, 3, 1), (3 * 32 + 31, 3, 2), (1, 1, 7)],
)
def test_it_is_the_sum_of_bits_over_the_sum_of_bytes(
    model, tokenizer, rows, num_tokens, num_rows, batch_size
):
    found = measure(model, tokenizer, rows, num_tokens=num_tokens, batch_size=batch_size)
    with torch.no_grad():
        expected = straight_line(model, tokenizer, rows, num_rows)
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_model_stays_in_its_mode(model, tokenizer, rows):
    try:
        model.train()
        measure(model, tokenizer, rows)
        assert model.training
    finally:
        model.eval()
    measure(model, tokenizer, rows)
    assert not model.training
