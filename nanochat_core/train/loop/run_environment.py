"""The device, versions and settings a training stage ran with. None of them changes its result."""

from typing import Any

import torch

from nanochat_core.job import Job
from nanochat_core.model.attention import attention_backend
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.hardware.oom import peak_gigabytes


def run_environment(job: Job, device: torch.device, world: World) -> dict[str, Any]:
    """Return numbers and short strings for a stage's metrics."""
    found: dict[str, Any] = {
        "device": device_name(device),
        "torch": torch.__version__,
        "world_size": world.size,
        # Less than what was asked for if memory ran out.
        "device_batch_size": job.resources.device_batch_size,
        "attention": attention_backend(),
        "compile": job.resources.compile,
        "determinism": job.resources.determinism,
    }
    peak = peak_gigabytes()
    return found if peak is None else {**found, "peak_memory_gb": round(peak, 2)}


def device_name(device: torch.device) -> str:
    """Return torch's name of the device: a GPU's product name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
