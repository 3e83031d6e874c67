"""Remember in a job's work directory which device batch sizes did not fit this machine's memory."""

import json
from dataclasses import replace

from nanochat_core.job import Job, write_json

_FILE = "too_large.json"  # device batch sizes


def note_too_large(job: Job) -> None:
    """Note that the job ran out of memory."""
    sizes = {*_too_large(job), job.resources.device_batch_size}
    write_json(job.directory / _FILE, sorted(sizes))


def fitting(job: Job) -> Job:
    """Return the job with its device batch size halved below all sizes that did not fit."""
    size, too_large = job.resources.device_batch_size, _too_large(job)
    while size in too_large and size > 1:
        size //= 2
    return replace(job, resources=replace(job.resources, device_batch_size=size))


def _too_large(job: Job) -> list[int]:
    try:
        return json.loads((job.directory / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
