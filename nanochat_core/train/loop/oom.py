"""Running out of memory in a step's passes: all ranks agree on it, and go on with smaller bites.

The rows of a step and its loss do not depend on the device batch size, beyond the order of a sum,
so a step whose gradients, or the values they are taken from, did not fit is simply done again.
Elsewhere in a loop a lack of memory ends the stage: the optimizer's step, say, changes the state as
it goes.
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
from nanochat_core.runtime.heartbeat import HEART
from nanochat_core.runtime.progress import Progress

Found = TypeVar("Found")

_STATE = "device_batch_size"  # as the job was given it, and as it is by now


class OomRetry:
    """The device batch size of a loop. `size` is what it is by now."""

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
        """Continue with the size of the checkpoint that had this `state`.

        If the job was given the same size then: so resuming equals not stopping, to the order of a
        sum. A job that is given another one now starts with that.
        """
        given, size = state.get(_STATE, (None, None))
        if given == self._given:
            self.size = size

    def state(self) -> dict[str, Any]:
        """What the loop saves with its own state."""
        return {_STATE: [self._given, self.size]}

    def gradients(self, compute: Callable[..., Tensor]) -> Tensor:
        """The loss of a step over all ranks, whose gradients `compute` adds to the optimizer's.

        `compute(device_batch_size=...)` gives this rank's share of the loss. It must not wait for
        other ranks, of which one may be out of memory by then: what they do together is done
        before. Raises StageError when nothing smaller may be tried.
        """
        HEART.beat("gradients")
        optimizer = self._optimizer
        # A rank that failed has not begun its sums; the others have, in this order.
        loss = self._fit(
            compute, failed=optimizer.start_reduce_scatter, again=optimizer.drop_gradients
        )
        return self._world.sum(loss)

    def values(self, compute: Callable[..., Found]) -> Found:
        """What `compute(device_batch_size=...)` gives: a pass that leaves no gradients behind.

        It must not wait for other ranks either. Raises StageError as `gradients` does.
        """
        HEART.beat("values")
        return self._fit(compute, failed=_nothing, again=_nothing)

    def _fit(
        self,
        compute: Callable[..., Found],
        *,
        failed: Callable[[], None],  # by the rank that ran out of memory, before they agree
        again: Callable[[], None],  # by all ranks, before they try again
    ) -> Found:
        while True:
            found, why = None, ""
            try:
                found = compute(device_batch_size=self.size)
            except RuntimeError as error:  # torch's OutOfMemoryError is one
                if not is_out_of_memory(error):
                    raise
                why = str(error).splitlines()[0]
            # The error is gone by here, and with it the frames that hold the step's activations.
            if found is None:
                make_room()
                failed()
            HEART.beat("agreeing on memory")
            if not self._world.any(found is None):
                assert found is not None
                return found
            del found
            again()
            make_room()
            self._shrink(why or "another rank is out of memory")

    @contextlib.contextmanager
    def explain_oom(self) -> Generator[None]:
        """Inside, a lack of memory that `gradients` cannot mend is told as what a person can do."""
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
            "command goes on from the last checkpoint",
        )

    def _shrink(self, why: str) -> None:
        if self.size == 1 or not self._retry:
            raise self._too_much(why)
        tried, peak = self.size, peak_gigabytes()
        memory = "" if peak is None else f", at a peak of {peak:.1f} GB"
        self.size = tried // 2
        self._progress.message(
            f"out of memory with {tried} rows per device{memory}: going on with {self.size}. The "
            "same rows make up each step; only the order in which they are summed differs"
        )


def _nothing() -> None:
    pass


def make_room() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch had no memory left: on a GPU an error of its own, on the CPU only a text."""
    return isinstance(error, torch.OutOfMemoryError) or (
        "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def peak_gigabytes() -> float | None:
    """Most GPU memory that this process has had in use; None on the CPU."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.max_memory_allocated() / 1e9
