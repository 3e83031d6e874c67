"""Save a training loop's state: copied between two steps, written while training continues.

What a rank owns is copied to the host (on a GPU into pinned memory, by the stream that computes, so
the host waits for nothing), then written, read back and committed by a thread. One save at a time:
when the next is due while one is being written, the loop waits.

A thread, not a process: what it does (writing, hashing, comparing) runs without Python's lock, but
for moments, and a process would need the copy in shared memory and a torch of its own. Its priority
is the loop's: a lower one takes no less of a CPU, and when the job has to end in seconds next to
other busy programs, the save would come too late.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nanochat_core.job import Job
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.device import use_device
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.hardware.gc_disabled import collect
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.interrupt import STOP, Interrupted
from nanochat_core.runtime.progress import Progress
from nanochat_core.train.loop.checkpoint import (
    CheckpointFacts,
    clear,
    commit,
    find_checkpoint,
    newest_step,
    prune,
    set_aside_after,
    write_pieces,
)
from nanochat_core.train.loop.metrics import TrainMetrics, broken

_SECONDS_BETWEEN_BEATS = 0.25
# A loop that waits for a save still beats; after so long the disk hangs, and it stops beating, so
# that the launcher ends the job.
_SECONDS_FOR_A_DISK = 3600.0
_FIRST_STEP_TIMES = _WRITING_TIMES = 4.0  # see heartbeat.busy


class Checkpointer:
    """Saves a training loop's state when it is due and when the job is asked to stop."""

    def __init__(
        self,
        job: Job,
        optimizer: Optimizer,
        world: World,
        progress: Progress,
        metrics: TrainMetrics,
    ) -> None:
        self._root, self._resources = job.checkpoints, job.resources
        self._optimizer, self._world, self._progress, self._metrics = (
            optimizer,
            world,
            progress,
            metrics,
        )
        self.num_steps = 0  # of the whole run
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None  # by this execution
        self._staging = Staging()
        self._writing: _Writing | None = None
        self._stopping = threading.Event()  # all ranks know that the job is to end
        metrics.last_good = self._last_good
        self._allowance = contextlib.ExitStack()

    def resume(self, num_steps: int) -> tuple[int, dict[str, Any]]:
        """Load the newest checkpoint; return the number of steps done and the loop's own state.

        `num_steps`: of the whole run. Returns (0, {}) without a checkpoint.
        """
        self.num_steps = num_steps
        # Kernels are compiled in the first step, where no loop can beat. `is_due` ends this.
        self._allowance.enter_context(HEARTBEAT.busy("the first step", times=_FIRST_STEP_TIMES))
        found = find_checkpoint(
            self._root,
            warn=self._progress.message,
            rank=self._world.rank,
            world_size=self._world.size,
            any_rank=self._world.any,
        )
        if found is None:
            return 0, {}
        self._optimizer.load(found.read)
        self._metrics.resume(found.state, found.seconds)
        measured = self._metrics.state()
        own = {name: value for name, value in found.state.items() if name not in measured}
        return found.step, own

    def is_due(self, done: int) -> bool:
        """Return whether to save the state after `done` steps. Collective.

        A save is due by the clock or the number of steps, after the last step, before the loop
        evaluates, and when the job was asked to stop. Raises what an earlier save failed with.
        """
        self._allowance.close()
        HEARTBEAT.beat("agreeing to continue", steps=1)
        every = self._resources.save_every_steps
        is_due = (
            # The first save of an execution comes after its first step: the memory for copies is
            # taken early, and a disk or a store that refuses is known within the first minute.
            self._saved_step is None
            or time.monotonic() - self._saved_at >= self._resources.save_every_seconds
            or (every > 0 and done % every == 0)
        )
        # One rank's signal or clock decides for all: a rank that saved or stopped alone would leave
        # the others waiting in a collective.
        stopping, is_due = self._world.any_of(STOP.requested, is_due)
        if stopping:
            self._stopping.set()
        if self._writing is not None and self._writing.ended:
            self._wait()  # at once; raises what a save failed with, at the next step
        return stopping or is_due or done == self.num_steps or self.is_to_validate(done)

    def save(self, done: int, state: dict[str, Any]) -> None:
        """Save the state after `done` steps, and `state`, which `resume` returns. Collective.

        Returns when it is copied. Raises Interrupted, with all of it on the disk, if the job was
        asked to stop. While the loss is far above its level, only a job's last state is saved.
        """
        self._metrics.sync()  # a state whose loss is broken is not saved
        stopping = self._stopping.is_set()
        is_last = stopping or done == self.num_steps
        if stopping:
            self._progress.stopping(done)
        # While the loss is far above its level the state may be broken already.
        if is_last or not self._metrics.is_high:
            self._start_save(done, state, is_last=is_last)
        if stopping:
            self._wait()
            self._world.barrier()  # rank 0 commits: no rank ends before the checkpoint counts
            self._progress.message(
                f"stopped at step {done}/{self.num_steps}; the same command resumes"
            )
            raise Interrupted

    def is_to_validate(self, done: int) -> bool:
        """Return whether the loop evaluates after `done` steps, other than at its two ends."""
        every = self._resources.eval_every_steps
        return every > 0 and done % every == 0 and 0 < done < self.num_steps

    def close(self) -> None:
        """Wait until the last save is committed. What follows is the end of the job."""
        self._wait()
        self._allowance.close()
        # The optimizer's state is gathered and the model written in a few long calls that cannot
        # beat, so they are allowed more time.
        self._allowance.enter_context(HEARTBEAT.busy("writing the model", times=_WRITING_TIMES))

    def _start_save(self, done: int, state: dict[str, Any], *, is_last: bool) -> None:
        self._wait()
        # Rank 0 waits for the files of other nodes, which they send: no rank may begin the next
        # save before, or they would give up what they send.
        self._world.barrier()
        HEARTBEAT.beat("saving")
        measured = self._metrics.state()
        assert not measured.keys() & state.keys(), f"these names are taken: {', '.join(measured)}"
        if self._world.local_rank == 0:  # on each machine: they may have disks of their own
            clear(self._root, done)
        self._world.barrier()  # no rank writes into a directory that is yet to be cleared
        facts = CheckpointFacts(
            step=done,
            total=self.num_steps,
            world_size=self._world.size,
            seconds=self._metrics.seconds,
            state={**state, **measured},
        )
        tensors, arrived = self._staging.copy(self._optimizer.pieces())
        # Then no older one is removed: one of them may prove to be the last good checkpoint.
        is_doubtful = self._metrics.is_high
        self._writing = _Writing(lambda: self._write(facts, tensors, arrived, is_doubtful, is_last))
        self._saved_at, self._saved_step = time.monotonic(), done
        collect()  # the loop stands still here anyway
        self._metrics.start_timer()

    def _write(
        self,
        facts: CheckpointFacts,
        tensors: Mapping[str, Tensor],
        arrived: Callable[[], None],
        is_doubtful: bool,
        is_last: bool,
    ) -> None:
        """Make the copy a checkpoint. Runs in the writing thread.

        Unless it `is_last`, it is given up for the last one when the job is asked to stop while
        files of other nodes are outstanding: the time that is left is for what is saved last.
        """
        arrived()
        for key, tensor in tensors.items():
            if not _is_finite(tensor):
                what = f"{key} is not finite after step {facts.step}"
                raise broken(what, newest_step(self._root))
        directory = self._root / f"step-{facts.step:07d}"
        write_pieces(directory, self._world.rank, tensors)
        if self._world.is_first:
            is_committed = commit(
                directory,
                facts,
                lambda: not is_last and (STOP.requested or self._stopping.is_set()),
            )
            if is_committed and not is_doubtful:
                prune(self._root, keep=self._resources.keep_checkpoints)

    def _last_good(self, step: int) -> int | None:
        """Return the newest checkpoint of at most `step`, after waiting for the save in progress.

        Newer ones are set aside, so that the job does not resume from them.
        """
        if self._writing is not None:
            self._writing.join(STOP.seconds_to_save)
        if self._world.is_first:
            set_aside_after(self._root, step)
        return newest_step(self._root, at_most=step)

    def _wait(self) -> None:
        """Wait until nothing is being written. Raises what the save failed with."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.wait()


def _is_finite(tensor: Tensor) -> bool:
    """Return whether every number of the tensor is finite."""
    # A finite sum proves it in a twentieth of the time; one that overflowed proves nothing.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


class Staging:
    """Host memory for copies of the state, allocated once and reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copy the tensors to the host; return the copies, and what waits until they are complete.

        The next call overwrites them. Copies from a GPU are queued on its current stream, before
        the next step's kernels: those cannot change what was not copied yet.
        """
        for key, tensor in tensors.items():
            if key not in self._buffers:
                self._buffers[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                )
            self._buffers[key].copy_(tensor.detach(), non_blocking=True)
        device = next((t.device for t in tensors.values() if t.is_cuda), None)
        if device is None:
            return dict(self._buffers), lambda: None
        event = torch.cuda.Event()
        event.record()

        def wait() -> None:
            use_device(device)  # of the thread that waits
            event.synchronize()

        return dict(self._buffers), wait


class _Writing:
    """A save in a thread of its own, a daemon: it ends with the process."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True if `wait` would return at once."""
        return not self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until it is done, for so long at most."""
        self._thread.join(seconds)

    def wait(self) -> None:
        """Wait until it is done, beating meanwhile. Raises what it raised."""
        silent_from = time.monotonic() + _SECONDS_FOR_A_DISK
        while not self.ended:
            if time.monotonic() < silent_from:
                HEARTBEAT.beat("waiting for a save")
            self._thread.join(_SECONDS_BETWEEN_BEATS)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the loop raises it
            self._error = error
