"""Learning rate, Muon momentum and Muon weight decay as pure functions of the step.

Steps count from 0 to num_steps - 1. The learning rate warms up over a number of steps, holds, then
falls linearly (the warmdown) over a share of the run; Muon's momentum rises, holds, and falls in
the same warmdown.
"""

import math

from nanochat_core.config import ScheduleConfig


def lr_multiplier(step: int, num_steps: int, schedule: ScheduleConfig) -> float:
    """Return the factor on every learning rate at `step`."""
    if step < schedule.warmup_steps:
        # + 1: a factor of 0 at step 0 would waste the step.
        return (step + 1) / schedule.warmup_steps
    warmdown = warmdown_steps(num_steps, schedule)
    # <=, while muon_momentum has <: both as in nanochat. At the boundary both formulas give 1.
    if step <= num_steps - warmdown:
        return 1.0
    remaining = (num_steps - step) / warmdown
    return remaining + (1.0 - remaining) * schedule.final_lr_fraction


def muon_momentum(step: int, num_steps: int, schedule: ScheduleConfig) -> float:
    """Return Muon's momentum at `step`. In a run too short for both, the warmup has precedence."""
    if step < schedule.momentum_warmup_steps:
        progress = step / schedule.momentum_warmup_steps
        return _between(schedule.momentum_start, schedule.momentum_peak, progress)
    warmdown = warmdown_steps(num_steps, schedule)
    if warmdown == 0 or step < num_steps - warmdown:
        return schedule.momentum_peak
    progress = (step - (num_steps - warmdown)) / warmdown
    return _between(schedule.momentum_peak, schedule.momentum_end, progress)


def muon_weight_decay(step: int, num_steps: int, base: float) -> float:
    """Return Muon's weight decay at `step`: a half cosine from `base` to 0."""
    return base * 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


def warmdown_steps(num_steps: int, schedule: ScheduleConfig) -> int:
    """Return the number of steps at the end of the run over which the learning rate falls."""
    return round(schedule.warmdown_fraction * num_steps)


def _between(start: float, end: float, progress: float) -> float:
    return (1.0 - progress) * start + progress * end
