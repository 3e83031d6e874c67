"""An epoch's order follows from its seed, and is drawn once for all of its steps."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from flows.profiles import open_profile
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.train.chat import epoch_ids, epoch_order
from nanochat_core.train.rl import question_ids

pytestmark = pytest.mark.torch


def drawn(count, seed, epoch):
    """The order of an epoch, drawn anew."""
    generator = torch.Generator().manual_seed(seed_for(seed, "epoch", epoch))
    return torch.randperm(count, generator=generator).tolist()


@pytest.mark.parametrize("count", [1, 5, 16, 1000])  # steps span several epochs, or not
def test_an_epochs_order_is_the_seeds_and_is_drawn_once(count):
    config = replace(open_profile("tiny").run.rl, examples_per_step=8)
    endless = [i for epoch in range(80) for i in drawn(count, 7, epoch)][:80]
    epoch_order.cache_clear()
    found = [question_ids(step, count, config, 7, ALONE) for step in range(len(endless) // 8)]
    assert list(chain.from_iterable(found)) == endless
    assert epoch_order.cache_info().misses == -(-len(endless) // count)


@pytest.mark.parametrize(("count", "rows"), [(1, 4), (10, 4), (12, 4), (1000, 64)])
def test_an_epochs_rows_are_the_seeds_and_are_drawn_once(count, rows):
    steps = -(-count // rows)
    epoch_order.cache_clear()
    for epoch in range(3):
        seen = [
            i for n in range(steps) for i in epoch_ids(epoch * steps + n, count, rows, 7).tolist()
        ]
        assert seen == drawn(count, 7, epoch)
    assert epoch_order.cache_info().misses == 3
