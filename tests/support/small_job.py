"""A job on one thread of a CPU, for tests that name only what matters to them."""

from pathlib import Path
from typing import Any

from nanochat_core.job import Job, Resources


def one_thread(**changes: Any) -> Resources:
    """Return resources with `changes`; without them one row at a time, and no validation."""
    least = {"threads": 1, "device_batch_size": 1, "save_every_seconds": 3600.0}
    return Resources(**{"device": "cpu", "eval_every_steps": 0, **least, **changes})


def small_job(directory: Path, **changes: Any) -> Job:
    """Return a job in `directory` with `changes` to its fields; nothing is written."""
    least = {"stage": "pretrain", "entry": "toy", "fingerprint": "f" * 64, "config": {}}
    defaults = {**least, "inputs": {}, "resources": one_thread()}
    return Job(directory=directory, **{**defaults, **changes})
