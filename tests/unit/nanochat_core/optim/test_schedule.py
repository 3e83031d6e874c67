"""The schedules at their edges."""

import dataclasses

import pytest

from nanochat_core.optim.schedule import lr_multiplier, muon_momentum, muon_weight_decay
from nanochat_core.scaling import chat_schedule, pretrain_schedule

PRETRAIN = pretrain_schedule()
STEPS = 2000  # the warmdown is the last 1300


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        *((0, 1 / 40), (38, 39 / 40), (39, 1.0), (40, 1.0), (700, 1.0)),  # N - warmdown holds
        (701, 1299 / 1300 + 1 / 1300 * 0.05),
        (1350, 0.5 + 0.5 * 0.05),
        (1999, 1 / 1300 + 1299 / 1300 * 0.05),
    ],
)
def test_the_learning_rate_warms_up_holds_and_falls_to_a_twentieth(step, expected):
    assert lr_multiplier(step, STEPS, PRETRAIN) == pytest.approx(expected, abs=1e-12)


def test_the_warmdown_is_rounded_to_whole_steps():
    # 0.65 * 101 = 65.65, so 66 steps: the last full one is 35
    assert lr_multiplier(40, 101, PRETRAIN) < 1.0
    no_warmup = dataclasses.replace(PRETRAIN, warmup_steps=0)
    assert lr_multiplier(35, 101, no_warmup) == 1.0
    assert lr_multiplier(36, 101, no_warmup) == pytest.approx(65 / 66 + 1 / 66 * 0.05)


def test_without_warmup_or_warmdown_the_learning_rate_is_constant():
    flat = dataclasses.replace(PRETRAIN, warmup_steps=0, warmdown_fraction=0.0)
    assert {lr_multiplier(step, 10, flat) for step in range(10)} == {1.0}
    assert muon_momentum(999, 1000, flat) == PRETRAIN.momentum_peak


def test_a_chat_schedule_falls_towards_zero_from_the_first_step():
    schedule = chat_schedule(warmdown_fraction=1.0)
    rates = [lr_multiplier(step, 4, schedule) for step in range(4)]
    assert rates == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        *((0, 0.85), (200, 0.91), (399, 0.85 + 0.12 * 399 / 400), (400, 0.97), (699, 0.97)),
        *((700, 0.97), (1350, 0.935), (1999, 0.97 - 0.07 * 1299 / 1300)),
    ],
)
def test_the_momentum_rises_holds_and_falls_in_the_warmdown(step, expected):
    assert muon_momentum(step, STEPS, PRETRAIN) == pytest.approx(expected, abs=1e-12)


def test_in_a_short_run_the_momentum_only_rises():
    momenta = [muon_momentum(step, 100, PRETRAIN) for step in range(100)]
    assert momenta == sorted(momenta)
    assert momenta[-1] == pytest.approx(0.85 + 0.12 * 99 / 400)


def test_weight_decay_falls_along_a_half_cosine_to_zero():
    assert muon_weight_decay(0, 100, 0.28) == pytest.approx(0.28)
    assert muon_weight_decay(25, 100, 0.28) == pytest.approx(0.28 * 0.8535533905932737)
    assert muon_weight_decay(50, 100, 0.28) == pytest.approx(0.14)
    assert muon_weight_decay(100, 100, 0.28) == pytest.approx(0.0)
    assert muon_weight_decay(7, 100, 0.0) == 0.0
