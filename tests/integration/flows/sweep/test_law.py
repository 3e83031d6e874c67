"""The ranges of a law hold what was planted: thirty fits at each level of noise."""

import numpy as np
import pytest

from flows.sweep.law import fit_law
from tests.unit.flows.sweep.test_law import EXPONENT, FLOOR, NEXT, loss, planted


@pytest.mark.parametrize("noise", [0.0005, 0.01])
def test_ranges_hold_what_was_planted_as_often_as_they_say(noise):
    trials, inside = 30, {"floor": 0, "exponent": 0, "prediction": 0}
    random = np.random.default_rng(7)
    for seed in range(trials):
        fit = fit_law(planted(noise=noise, seed=seed))
        prediction = fit.predict(NEXT)
        measured = loss(NEXT) * (1 + noise * random.standard_normal())
        for what, known, true in (
            ("floor", fit.floor_range, FLOOR),
            ("exponent", fit.exponent_range, EXPONENT),
            ("prediction", (prediction.low, prediction.high), measured),
        ):
            inside[what] += known[0] <= true <= known[1]

    # Of 30 at 95 %, fewer than 24 would come up once in a thousand times.
    assert all(count >= 24 for count in inside.values()), inside
