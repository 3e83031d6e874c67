"""A lack of memory ends a job with an error that says what may fit.

After `OutOfMemory` the launcher starts the job again with half the device batch size, from its last
checkpoint. The rows of a step and its loss do not depend on the device batch size, beyond
the order of a sum. Where it cannot help the error is a StageError: while answers are sampled, and
where the host of a GPU has no memory left.
"""

import contextlib
from collections.abc import Generator

import torch

from nanochat_core.errors import OutOfMemory, StageError, first_line
from nanochat_core.job import Resources


@contextlib.contextmanager
def oom_explained(resources: Resources) -> Generator[None]:
    """Raise a lack of memory as OutOfMemory; as StageError if no smaller size may be tried."""
    try:
        yield
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
        raise _explained(resources, error) from error


@contextlib.contextmanager
def answers_oom_explained() -> Generator[None]:
    """Raise a lack of memory while answers are sampled as StageError: no device batch helps."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise StageError(
            f"out of memory while sampling answers{_at_peak()}: {first_line(error)}",
            hint="the device batch size does not change it: use bigger GPUs or a smaller --depth",
        ) from error


def _explained(resources: Resources, error: RuntimeError) -> StageError:
    if resources.device == "cuda" and not isinstance(error, torch.OutOfMemoryError):
        return StageError(
            f"the host is out of memory: {first_line(error)}",
            hint="the device batch size does not change it: use a machine with more memory, or "
            "fewer GPUs of this one",
        )
    size = resources.device_batch_size
    rows = "one row" if size == 1 else f"{size} rows"
    what = f"out of memory with {rows} per device{_at_peak()}: {first_line(error)}"
    if size == 1:
        return StageError(
            what,
            hint="no smaller device batch can help: use more GPUs, or bigger ones, or a smaller "
            "--depth",
        )
    kind = OutOfMemory if resources.retry_smaller_batch else StageError
    return kind(
        what,
        hint=f"give --device-batch-size {size // 2}: the result is the same, and the same "
        "command resumes from the last checkpoint",
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if torch had no memory left. On a GPU the error has a class, on the CPU only a text."""
    return isinstance(error, torch.OutOfMemoryError) or (
        "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def _at_peak() -> str:
    peak = peak_gigabytes()
    return "" if peak is None else f", at a peak of {peak:.1f} GB"


def peak_gigabytes() -> float | None:
    """Return the most GPU memory that this process has had in use, in GB; None on the CPU."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.max_memory_allocated() / 1e9
