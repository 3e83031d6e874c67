"""Pretraining is nanochat's recipe: its losses are those of an implementation written apart.

The reference is `recipe_reference.py`; both see the same rows of the text below and start from our
initial weights, but for what the recipe sets to zero. With zero projections the logits do not
depend on the scale of the stream, so the true gradients of its scalars are zero; AdamW makes whole
steps of the rounding errors in their place, and two fp32 programs differ in the second digit after
20 steps. From weights a little off zero they agree to the seventh.
"""

import dataclasses

import numpy as np
import pytest
import torch

from nanochat_core import scaling
from nanochat_core.data.row_files import SPLITS, Rows
from nanochat_core.model.gpt import GPT
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train.chat import scaled
from tests.support.nanochat_core.random_gpt import shape_of
from tests.support.nanochat_core.row_files import write_rows
from tests.support.nanochat_core.train.fixtures import Bench
from tests.support.nanochat_core.train.pretrain_from_noise import noise
from tests.support.nanochat_core.train.recipe_reference import Recipe, token_losses_at

pytestmark = pytest.mark.torch

TEXT = """
A model that reads text learns it one piece at a time. Each piece is a token, and what is asked of
the model is which token comes next. At first it knows nothing: every token is as likely as any
other, and the loss is the logarithm of their number. Then it learns that some tokens are common;
then that some follow others; then, slowly, that what was said a line ago decides what is said here.

    def mean(values):
        total = 0.0
        for value in values:
            total += value
        return total / len(values)

Code is text too, and more regular than most: a bracket that opens will close, a name that is used
was given before, and a line that ends in a colon is followed by one that stands further in. "Why,"
asked the reader, "does it not simply remember?" Because 1,048,576 rows are more than it can hold.
"""
SEED, STEPS, ROWS, LENGTH = 7, 20, 8, 48
VOCAB = 290
TOLERANCE = 1e-5  # 1e-4 is promised, 2e-7 was measured
MODEL = shape_of(12, 12, LENGTH, LENGTH, vocab_size=VOCAB)
# As large as a batch of 2^17 tokens would have it, so that much is learnt in few steps.
SIZES = {"total_batch_size": 2**17, "tokens": 3_000_000, "reference_tokens": 5_000_000}
RECIPE = Recipe(num_steps=STEPS, warmup_steps=4, momentum_warmup_steps=6, **SIZES)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return a job of pretraining on rows of the text."""
    root = tmp_path_factory.mktemp("recipe")
    tokenizer = Tokenizer.train(iter([TEXT]), vocab_size=VOCAB)
    (root / "tokenizer").mkdir()
    tokenizer.save(root / "tokenizer")
    rows = write_rows(root / "rows", tokenizer, dict.fromkeys(SPLITS, rows_of(tokenizer)))
    inputs = {"rows": rows, "tokenizer": root / "tokenizer"}
    schedule = dataclasses.replace(
        scaling.pretrain_schedule(), warmup_steps=4, momentum_warmup_steps=6
    )
    section = {"num_steps": STEPS, "total_batch_size": ROWS * LENGTH, "eval_tokens": LENGTH}
    job = Bench(tmp_path_factory, root).job("pretrain", inputs=inputs, section=section)
    config = {
        "seed": SEED,
        "numerics": scaling.numerics("fp32").tree(),
        "model": MODEL.tree(),
        # Half of the recipe's rates, twice: `lr_fraction` is a factor of all of them.
        "optimizer": scaled(scaling.optimizer_for(MODEL, **SIZES), 0.5).tree(),
        "pretrain": {**job.config["pretrain"], "schedule": schedule.tree(), "lr_fraction": 2.0},
    }
    return dataclasses.replace(job, config=config)


def rows_of(tokenizer):
    """Return windows of the text as rows; each begins with BOS, as rows do."""
    ids = tokenizer.encode(TEXT)
    starts = [37 * i % (len(ids) - LENGTH) for i in range(60)]
    return np.array([[tokenizer.bos, *ids[start : start + LENGTH]] for start in starts])


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_zero():
    """Initial weights have no zeros in this module; see above."""
    with noise():
        yield


@pytest.fixture(scope="module")
def ours(job):
    """Return the losses that the stage reported, one for each step."""
    Bench.run(job)
    assert list(Bench.values(job)) == list(range(1, STEPS + 1))
    return Bench.losses(job)


def test_every_loss_is_that_of_the_recipe(job, ours):
    rows = Rows.open(job.inputs["rows"], "train")
    batches = [
        torch.from_numpy(rows.take(rows.step_ids(step, ROWS, SEED))) for step in range(STEPS)
    ]
    model = GPT(MODEL, scaling.numerics("fp32"))
    model.init_weights(SEED)
    expected = list(token_losses_at(dict(model.named_parameters()), batches, MODEL, RECIPE))
    assert expected[0] > 5.6
    assert expected[-1] < expected[0] - 3  # so that there is something to compare
    assert ours == pytest.approx(expected, rel=TOLERANCE)


# Of the reference on torch 2.13, whose random numbers the initial weights are.
GOLDEN = """
    5.670432 5.576738 5.220283 4.690851 4.300383 3.823526 3.608911 3.375220 3.127391 2.998337
    2.974204 2.826488 2.671682 2.584914 2.422160 2.321238 2.273824 2.298854 2.280479 2.310755
"""


def test_the_losses_are_those_written_down(ours):
    assert ours == pytest.approx(list(map(float, GOLDEN.split())), rel=TOLERANCE)
