"""Recover from running out of memory: all ranks halve the device batch size and redo the step.

It is enough that one rank ran out, in forward or backward. The rows of a step and its loss do not
depend on the device batch size, beyond the order of a sum, so a step whose gradients, or the values
they are computed from, did not fit is done again. Elsewhere in a loop a lack of memory ends the
stage: the optimizer's step, for example, has changed half of the state by then.
"""

import contextlib
import gc
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress

Found = TypeVar("Found")

_STATE = "device_batch_size"  # [what the job was given, what it is now]


class OomRetry:
    """The device batch size of a loop; `size` is its value now."""

    def __init__(
        self,
        job: Job,
        optimizer: Optimizer,
        world: World,
        progress: Progress,
    ) -> None:
        self._given = self.size = job.resources.device_batch_size
        self._retry = job.resources.retry_smaller_batch
        self._optimizer, self._world, self._progress = optimizer, world, progress

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue with the size in the checkpoint's `state`.

        A job that is now given another size than then starts with what it is given.
        """
        # So resuming equals not stopping: the size decides the order in which rows are summed.
        given, size = state.get(_STATE, (None, None))
        if given == self._given:
            self.size = size

    def state(self) -> dict[str, Any]:
        """Return what the loop saves with its own state."""
        return {_STATE: [self._given, self.size]}

    def gradients(self, compute: Callable[..., Tensor]) -> Tensor:
        """Return the loss of a step over all ranks; `compute` gives the optimizer its gradients.

        `compute(device_batch_size=...)` returns this rank's share of the loss. It must not wait for
        other ranks, of which one may be out of memory by then: collectives come before it. Raises
        StageError if no smaller size may be tried.
        """
        HEARTBEAT.beat("gradients")
        optimizer = self._optimizer
        # The other ranks have started to sum gradients in this order: a rank that failed must start
        # the same sums, or they would wait for it.
        loss = self._fit(
            compute, failed=optimizer.start_reduce_scatter, again=optimizer.drop_gradients
        )
        return self._world.sum(loss)

    def values(self, compute: Callable[..., Found]) -> Found:
        """Return what `compute(device_batch_size=...)` does: a pass without gradients.

        It must not wait for other ranks either. Raises StageError as `gradients` does.
        """
        HEARTBEAT.beat("values")
        return self._fit(compute, failed=_nothing, again=_nothing)

    def _fit(
        self,
        compute: Callable[..., Found],
        *,
        failed: Callable[[], None],  # called by the rank that ran out, before the ranks agree
        again: Callable[[], None],  # called by all ranks, before they try again
    ) -> Found:
        while True:
            found, why = None, ""
            try:
                found = compute(device_batch_size=self.size)
            except RuntimeError as error:  # torch's OutOfMemoryError is one
                if not is_out_of_memory(error):
                    raise
                why = str(error).splitlines()[0]
            # Outside `except`: the error's traceback holds the frames, and these the activations.
            if found is None:
                make_room()
                failed()
            HEARTBEAT.beat("agreeing on memory")
            if not self._world.any(found is None):
                assert found is not None
                return found
            del found  # this rank's pass may have fitted: its memory is needed for the next try
            again()
            make_room()
            self._shrink(why or "another rank is out of memory")

    @contextlib.contextmanager
    def explain_oom(self) -> Generator[None]:
        """Raise as StageError, with a hint, a lack of memory that `gradients` does not recover."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_much(f"{error}".splitlines()[0]) from error

    def _too_much(self, why: str) -> StageError:
        peak = peak_gigabytes()
        memory = "" if peak is None else f", at a peak of {peak:.1f} GB"
        if self.size == 1:
            return StageError(
                f"out of memory with one row per device{memory}: {why}",
                hint="a row of rows.sequence_len tokens does not fit: use more GPUs, or bigger "
                "ones, or a smaller --depth",
            )
        return StageError(
            f"out of memory with {self.size} rows per device{memory}: {why}",
            hint=f"give --device-batch-size {self.size // 2}: the result is the same, and the same "
            "command resumes from the last checkpoint",
        )

    def _shrink(self, why: str) -> None:
        if self.size == 1 or not self._retry:
            raise self._too_much(why)
        tried, peak = self.size, peak_gigabytes()
        memory = "" if peak is None else f", at a peak of {peak:.1f} GB"
        self.size = tried // 2
        self._progress.message(
            f"out of memory with {tried} rows per device{memory}: continuing with {self.size}. The "
            "same rows make up each step; only the order in which they are summed differs"
        )


def _nothing() -> None:
    pass


def make_room() -> None:
    """Free what nothing refers to, on the host and on the GPU."""
    gc.collect()  # a training loop has the collector off
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if torch had no memory left. On a GPU the error has a class, on the CPU only a text."""
    return isinstance(error, torch.OutOfMemoryError) or (
        "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def peak_gigabytes() -> float | None:
    """Return the most GPU memory that this process has had in use, in GB; None on the CPU."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.max_memory_allocated() / 1e9
