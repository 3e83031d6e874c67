"""What a precision costs: the loss of a trained model on text that it has not seen."""

import argparse
import inspect
import itertools
import json
import math

import pytest
import torch

from nanochat_core.engine.native.runner import unable
from nanochat_core.engine.runners.choose import open_runner
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import numerics
from tests.support.nanochat_core.engine.native_models import chunk
from tests.support.nanochat_core.random_gpt import shape_of

pytestmark = pytest.mark.torch

LENGTH, ROWS, STEPS = 128, 16, 200


def make_rows(text, count):
    """(count, LENGTH + 1): a token a byte."""
    tokens = torch.tensor(list(text.encode("ascii", "replace")))
    return tokens[: count * (LENGTH + 1)].view(count, LENGTH + 1)


@pytest.fixture(scope="module")
def trained():
    """Four layers that have read a module of Python's library, for half a minute on one CPU."""
    config = shape_of(32, 32, 32, LENGTH, width=128, num_heads=2, vocab_size=265)
    model = GPT(config, numerics("fp32"))
    model.init_weights(1)
    text = inspect.getsource(argparse)
    rows = make_rows(text, len(text) // (LENGTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / STEPS)
        batch = rows[torch.randint(len(rows), (8,), generator=generator)]
        loss = model.token_losses(batch[:, :-1], batch[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def bits_per_byte(runner, rows):
    """Return that of what a runner thinks of each next token, a token at a time as in decoding."""
    total, count, tokens = 0.0, len(rows), rows.tolist()
    pages = -(-LENGTH // runner.page_size)
    for slot, group in itertools.product(range(count), range(len(runner.groups))):
        runner.set_table(group, slot, 0, [1 + slot * pages + i for i in range(pages)])
    for at in range(LENGTH):
        logits = runner.prefill([chunk(i, row, at, at + 1) for i, row in enumerate(tokens)])
        log_probs = torch.log_softmax(logits.double(), dim=-1)
        total -= float(log_probs.gather(1, rows[:, at + 1 : at + 2]).sum())
    return total / (count * LENGTH * math.log(2))


@pytest.fixture(scope="module")
def reference(trained):
    """The model's own bits per byte, and the rows they are of."""
    rows = make_rows(inspect.getsource(json.decoder), ROWS)
    with torch.no_grad():
        nats = trained.token_losses(rows[:, :-1], rows[:, 1:]).double().mean()
    value = float(nats) / math.log(2)
    assert 1.5 < value < 4.5  # it has learnt, and not by heart
    return value, rows


@pytest.mark.parametrize(
    ("runner", "precision", "tolerance"),
    [
        ("torch", "fp32", 1e-6),
        ("torch", "bf16", 1e-3),
        ("native", "fp32", 1e-6),
        ("native", "bf16", 1e-3),
        ("native", "int8", 5e-3),
    ],
)
def test_bits_per_byte_hardly_change(trained, reference, runner, precision, tolerance):
    if runner == "native" and (reason := unable(trained, precision)) is not None:
        pytest.skip(f"the compiled kernels cannot be had here: {reason}")
    expected, rows = reference
    opened = open_runner(
        trained, stop_tokens=(), precision=precision, runner=runner, num_slots=ROWS, memory=10**9
    )
    change = bits_per_byte(opened, rows) / expected - 1
    assert abs(change) < tolerance, f"{change:+.4%} of {expected:.4f}"
