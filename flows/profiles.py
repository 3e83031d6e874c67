"""Profiles: named functions that say what to train and at what pace. The CLI lists the docstrings."""

from collections.abc import Callable
from dataclasses import dataclass

from nanochat_core import scaling
from nanochat_core.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The placement numbers a profile suggests; they never change a result's identity."""

    device_batch_size: int
    save_every_seconds: float
    eval_every_steps: int
    max_gpus: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A named what-and-where."""

    run: RunConfig
    pace: Pace


def d12() -> Profile:
    """GPT-1 size, 286 M parameters: the smallest model worth comparing. One H100, under an hour."""
    return _gpu_profile(scaling.run_for_depth(12))


PROFILES: dict[str, Callable[[], Profile]] = {"d12": d12}


def _gpu_profile(run: RunConfig) -> Profile:
    return Profile(
        run=run,
        pace=Pace(device_batch_size=16, save_every_seconds=600.0, eval_every_steps=250, max_gpus=8),
    )
