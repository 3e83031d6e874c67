"""Report each step of a training loop, and end the run when its loss is broken.

On a GPU the host never waits for the step it has just queued: a step's loss is copied out in the
background and read one step later, when the device has long computed it. On the CPU it is read at
once, before the step is applied. A state is saved only after its own loss was read and found good:
while losses are far above their level none is, unless the job is asked to stop.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.hardware.gpu_specs import peak_flops
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.interrupt import STOP
from nanochat_core.runtime.progress import Progress
from nanochat_core.scaling import flops_per_token
from nanochat_core.train.loop.run_environment import device_name

WINDOW = 50  # steps whose median is the running level
PATIENCE = 10  # steps in a row above the limit before the run is stopped
FIRST_CHECKED = 100  # the loss may do anything while learning rates warm up
TIMES, PLUS = 3.0, 1.0  # the limit is 3 times the level plus 1 nat: a loss near 0 may jump


def is_exploding(losses: Sequence[float], step: int) -> bool:
    """Return whether each of the last 10 losses is above 3 times the median of the 50 before, + 1.

    `losses` are those of the steps up to and with `step`, the newest last. False before step 100,
    and with fewer than 50 losses to compare with.
    """
    return min(losses[-PATIENCE:], default=0.0) > limit_of(losses, step)


def limit_of(losses: Sequence[float], step: int) -> float:
    """Return the limit that the last 10 losses may not all exceed; infinity where there is none."""
    before = losses[:-PATIENCE][-WINDOW:]
    if step < FIRST_CHECKED or len(before) < WINDOW:
        return math.inf
    return TIMES * statistics.median(before) + PLUS


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The constants that turn a step's seconds into tokens per second, MFU and dollars."""

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None  # of all the job's devices together; None: not known
    dollars_per_hour: float


def pace_of(
    job: Job, model: GPT, *, tokens_per_step: int, device: torch.device, world: World
) -> Throughput:
    """Return those of a loop that trains `model` on steps of so many tokens."""
    peak = peak_flops(device_name(device))
    return Throughput(
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(model.config, model.numerics),
        peak_flops=None if peak is None else peak * world.size,
        dollars_per_hour=job.resources.dollars_per_hour,
    )


class TrainMetrics:
    """Reads, checks and reports the loss of every step.

    A loop calls `record` before the update and `flush` after it. The checkpointer calls `sync`
    before it saves. Raises StageError when a loss is not finite or explodes, which leaves the last
    checkpoint as it is.
    """

    def __init__(self, progress: Progress, pace: Throughput | None, *, late: bool) -> None:
        """`late`: read each loss one step later, so that the host does not wait for the device.

        Without a pace a loss that is not finite ends the run, and nothing else about it is checked
        or reported: an RL objective has no level to stay near.
        """
        self._progress, self._pace, self._late = progress, pace, late
        self._waiting: deque[_Reading] = deque()
        self._unreported: deque[tuple[int, dict[str, float]]] = deque()
        self._losses: deque[float] = deque(maxlen=WINDOW + PATIENCE)
        self._since = self._started = time.monotonic()
        self._seconds_before = 0.0
        self.is_high = False  # whether the newest loss that was read is far above its level
        # Returns the newest checkpoint of at most so many steps, and sets newer ones aside. The
        # Checkpointer puts its own here: it is made after this, with this.
        self.last_good: Callable[[int], int | None] = lambda step: None

    @property
    def seconds(self) -> float:
        """Seconds that the job has run, its earlier executions up to their checkpoint included."""
        return self._seconds_before + time.monotonic() - self._started

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint."""
        return {"losses": list(self._losses)}

    def resume(self, state: dict[str, Any], seconds: float) -> None:
        """Continue from a checkpoint that was saved after so many seconds of the job."""
        self._losses.extend(state["losses"])
        self._seconds_before = seconds

    def start_timer(self) -> None:
        """Start the next step's time here: what came before is not part of it."""
        self._since = time.monotonic()

    def record(self, done: int, loss: Tensor, **values: float) -> None:
        """Take the loss of the step that makes `done`, and check those that have arrived.

        `loss` is a scalar, equal on all ranks; `values` are reported with it.
        """
        HEARTBEAT.beat("reading the loss")
        self._waiting.append(_Reading(done, loss, values))
        late = self._late and STOP.steps_left is None  # `prove` needs the last loss too
        while len(self._waiting) > late:
            self._check(self._waiting.popleft())

    def flush(self) -> None:
        """Report the steps whose losses were read."""
        now = time.monotonic()
        while self._unreported:
            done, values = self._unreported.popleft()
            seconds, self._since = max(now - self._since, 1e-9), now
            self._progress.step(done, **values, **self._speeds(seconds))

    def sync(self) -> None:
        """Wait for every loss, check it and report it."""
        while self._waiting:
            self._check(self._waiting.popleft())
        self.flush()

    def _check(self, reading: "_Reading") -> None:
        # All ranks have the same loss, so they raise at the same step and none waits for another.
        loss, step = reading.value(), reading.done - 1
        if not math.isfinite(loss):
            raise broken(f"the loss is {loss} at step {step}", self.last_good(step))
        values = reading.values
        if self._pace is not None:
            values = {"loss": loss, **values}
            self._losses.append(loss)
            self.is_high = loss > limit_of(list(self._losses), step)
            if is_exploding(list(self._losses), step):
                raise broken(
                    f"the loss explodes: {loss:.4g} at step {step}, the last of {PATIENCE} far "
                    f"above its level of {statistics.median(list(self._losses)[:WINDOW]):.4g}",
                    self.last_good(step + 1 - PATIENCE),  # before the first of the high losses
                )
        self._unreported.append((reading.done, values))
        HEARTBEAT.beat("the optimizer's step")

    def _speeds(self, seconds: float) -> dict[str, float]:
        pace = self._pace
        if pace is None:
            return {"seconds": seconds}
        rate = pace.tokens_per_step / seconds  # of all ranks
        values = {"tokens_per_second": rate}
        if pace.peak_flops is not None:
            # Share of the peak FLOPS of the devices that the model's arithmetic used.
            values["mfu"] = rate * pace.flops_per_token / pace.peak_flops
        if pace.dollars_per_hour > 0:
            values["dollars"] = self.seconds / 3600 * pace.dollars_per_hour
        return values


def broken(what: str, saved_step: int | None) -> StageError:
    """Return the error of a run whose numbers are broken; it names the last good checkpoint."""
    if saved_step is None:
        return StageError(
            f"{what}, and no checkpoint was saved before",
            hint="lower the learning rates (--set optimizer.muon_lr=...) and run again",
        )
    return StageError(
        f"{what}; the last good checkpoint is that of step {saved_step}",
        hint="run the same command again to resume from there; if it recurs at the same step, "
        "lower the learning rates (--set optimizer.muon_lr=...): the stage then starts at step 0",
    )


class _Reading:
    """A loss on its way to the host."""

    def __init__(self, done: int, loss: Tensor, values: dict[str, float]) -> None:
        self.done, self.values = done, values
        self._event: torch.cuda.Event | None = None
        self._loss = loss.detach()
        if loss.is_cuda:
            # Only a copy into pinned memory is asynchronous.
            self._loss = torch.empty((), dtype=loss.dtype, pin_memory=True)
            self._loss.copy_(loss.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def value(self) -> float:
        """Return the number; waits until the device has computed it."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._loss)
