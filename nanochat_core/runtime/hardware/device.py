"""The device of a job, and the dtype its arithmetic runs in."""

import ctypes
import sys
from functools import lru_cache

import torch

from nanochat_core.errors import ConfigError
from nanochat_core.job import Resources
from nanochat_core.runtime.hardware.distributed import local_rank

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = 2**30  # bytes

# fp8 is used inside matrix products only: their inputs and outputs are bf16.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}

# What torch computes with MKL's VML on a CPU, as far as models call it on tensors large enough to
# be divided among threads.
VML = (torch.cos, torch.exp, torch.expm1, torch.log, torch.sin, torch.sqrt, torch.tanh)


def open_device(resources: Resources) -> torch.device:
    """Configure torch for the job's resources and return the device that this process uses.

    A rank of torchrun uses the GPU of its number on this machine. Call it before `open_world`: what
    joins the ranks would else make a context of 0.5 GB on the first GPU for each of them.

    Under `determinism` "strict", torch's operations are deterministic from here on or raise.
    """
    # The order of a CPU sum depends on the number of threads, so it is fixed, not detected.
    torch.set_num_threads(resources.threads)
    strict = resources.determinism == "strict"
    if strict != torch.are_deterministic_algorithms_enabled():
        # Not without need: this call imports torch's compiler, 1.5 CPU s at the start of a job.
        torch.use_deterministic_algorithms(strict)
    if resources.device == "cpu":
        _keep_freed_memory()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "the placement asks for a GPU and torch sees none",
            hint="run `nanochat doctor`, or give --gpus 0",
        )
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


@lru_cache(maxsize=1)
def choose_vml_kernels() -> None:
    """Make MKL choose the kernels of its vector functions, once per process, in one thread.

    oneMKL 2024.2, which is part of torch 2.13, chooses a function's kernel in its first call. Of
    threads that make that call together, one may compute its share with the least accurate kernel:
    errors of 1e-4 in a rotary table, another model (github.com/pytorch/pytorch/issues/188792).
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in VML:
            function(one)


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this thread; each thread begins with the first GPU.

    What a thread starts without naming a device (pinned memory, events, CUDA graphs) is the current
    device's, and makes a context of 0.5 GB there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the system.

    A training step frees and allocates the same memory repeatedly. Without new pages each time it
    is 10 % faster (depth 4, fp32), and the process 7 % larger.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            if not mallopt(_M_MMAP_THRESHOLD, _NEVER):
                mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest value that older versions accept
            mallopt(_M_TRIM_THRESHOLD, _NEVER)


def compute_dtype(precision: str) -> torch.dtype:
    """Return torch's dtype for `numerics.precision`."""
    return _DTYPES[precision]
