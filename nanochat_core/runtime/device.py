"""The device of a job, and the dtype its arithmetic runs in."""

import torch

from nanochat_core.errors import ConfigError
from nanochat_core.job import Resources

# fp8 is a way to multiply: what goes in and comes out is bf16.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def open_device(resources: Resources, *, local_rank: int = 0) -> torch.device:
    """The device this process uses; fixes the number of CPU threads, on which sums depend."""
    torch.set_num_threads(resources.threads)
    torch.use_deterministic_algorithms(resources.determinism == "strict")
    if resources.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "the placement asks for a GPU and torch sees none",
            hint="run `nanochat doctor`, or give --gpus 0",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def compute_dtype(precision: str) -> torch.dtype:
    """torch's dtype for `numerics.precision`."""
    return _DTYPES[precision]
