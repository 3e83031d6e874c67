"""Rows come in order, whole, ahead of time, and as int64."""

import threading
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from flows.profiles import open_profile
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.train.chat import epoch_ids, epoch_order
from nanochat_core.train.loop.prefetch import prefetch, widen
from nanochat_core.train.rl import question_ids

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_ids_keep_their_value_whatever_they_are_stored_as(dtype):
    ids = np.array([[0, 1, 32767], [32768, 40000, 65535]], dtype=dtype)
    ((step, (tensor,)),) = prefetch(lambda step: (ids,), start=4, stop=5, device=CPU)
    assert step == 4
    assert tensor.dtype == torch.int64
    assert tensor.tolist() == ids.tolist()
    big = np.array([2**31, 2**32 - 1], dtype=np.uint32)
    assert widen(torch.from_numpy(big.view(np.int32))).tolist() == big.tolist()


def rows(step):
    """Two arrays that say which step they are of."""
    return np.full((step + 1, 2), step, dtype=np.uint16), np.full((step + 1,), 1, dtype=np.uint8)


def test_steps_come_in_order_each_with_its_own_rows():
    seen = [
        (step, tokens.tolist(), mask.tolist())
        for step, (tokens, mask) in prefetch(rows, start=2, stop=6, device=CPU)
    ]
    assert seen == [(s, [[s, s]] * (s + 1), [1] * (s + 1)) for s in range(2, 6)]
    assert list(prefetch(rows, start=6, stop=6, device=CPU)) == []


def test_the_next_steps_rows_are_taken_while_this_one_is_used():
    taken = [threading.Event() for _ in range(4)]

    def take(step):
        taken[step].set()
        return rows(step)

    for step, _ in prefetch(take, start=0, stop=3, device=CPU):
        assert taken[step].is_set()
        if step < 2:
            assert taken[step + 1].wait(120)
    assert not taken[3].is_set()


def test_what_taking_raises_is_raised_when_its_step_comes():
    def take(step):
        if step == 2:
            raise ValueError("no such row")
        return rows(step)

    seen = []
    with pytest.raises(ValueError, match="no such row"):
        seen.extend(step for step, _ in prefetch(take, start=0, stop=5, device=CPU))
    assert seen == [0, 1]


def test_a_loop_that_is_left_leaves_no_thread():
    before = threading.active_count()
    for step, _ in prefetch(rows, start=0, stop=100, device=CPU):
        if step == 3:
            break
    assert threading.active_count() == before


@pytest.mark.gpu
def test_on_a_gpu_nothing_overtakes_its_copy():
    """The device is kept busy, so that a copy which did not wait would be seen. Needs a GPU."""
    device = torch.device("cuda", 0)

    def take(step):
        return (np.full((64, 2049), step * 500, dtype=np.uint16),)

    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for _, (tokens,) in prefetch(take, start=0, stop=40, device=device):
        busy = busy @ busy.clamp(-1e-3, 1e-3)
        sums.append(tokens.sum())
    assert [int(s) for s in sums] == [step * 500 * 64 * 2049 for step in range(40)]


def test_the_thread_uses_the_device_of_the_job(monkeypatch):
    used = []

    def use(device):
        used.append((threading.current_thread().name, device))

    monkeypatch.setattr("nanochat_core.train.loop.prefetch.use_device", use)
    list(prefetch(rows, start=0, stop=2, device=CPU))
    assert used == [("feed_0", CPU)]


# The order of an epoch follows from its seed, and is drawn once for all of its steps.


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
