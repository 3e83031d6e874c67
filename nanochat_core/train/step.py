"""What every training loop must do alike: one step's gradients, and its saved state.

The loss of a step is the mean over all its targets on all ranks, so neither the world size nor the
device batch size changes it (beyond the order of a sum).
"""

import time
from typing import Any

import torch

from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import find_checkpoint, save_checkpoint
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.distributed import World
from nanochat_core.runtime.interrupt import Interrupted, Stop
from nanochat_core.runtime.progress import Progress

IGNORE = -1  # target that carries no loss


def add_gradients(
    model: GPT,
    optimizer: Optimizer,
    tokens: torch.Tensor,  # (B, T+1) int64
    mask: torch.Tensor | None,  # (B, T+1), 1 where the token is learnt from; None: everywhere
    *,
    device_batch_size: int,
    world: World,
) -> float:
    """Give the optimizer the gradients of the mean loss over every rank's targets.

    Returns that mean in nats.

    `tokens` are this rank's rows of the step; they pass through the model in micro-steps of
    `device_batch_size` rows.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if mask is not None:
        targets = targets.masked_fill(mask[:, 1:] == 0, IGNORE)
    count = world.sum((targets != IGNORE).sum().float()).clamp(min=1)
    total = torch.zeros((), device=tokens.device)
    for first in range(0, len(tokens), device_batch_size):
        rows = slice(first, first + device_batch_size)
        loss = model.token_losses(inputs[rows], targets[rows]).sum() / count
        optimizer.backward(loss, last=first + device_batch_size >= len(tokens))
        total += loss.detach()
    return float(world.sum(total))


def check_loss(loss: float, step: int) -> None:
    """Stop before a broken step is taken: what is saved stays good."""
    if loss != loss or loss in (float("inf"), float("-inf")):
        raise StageError(
            f"the loss is {loss} at step {step}",
            hint="lower the learning rates (--set optimizer.muon_lr=...) and run again",
        )


class Keeper:
    """Saves a training loop's state, when it is due and when the job is asked to stop."""

    def __init__(self, job: Job, optimizer: Optimizer, world: World, progress: Progress) -> None:
        self._job, self._optimizer = job, optimizer
        self._world, self._progress = world, progress
        self._saved_at = time.monotonic()

    def resume(self) -> tuple[int, dict[str, Any]]:
        """Load the newest checkpoint; returns the number of steps done and the loop's own state."""
        found = find_checkpoint(self._job.checkpoints, warn=self._progress.message)
        if found is None:
            return 0, {}
        self._optimizer.load(found.tensors(torch.device("cpu")).__getitem__)
        return found.step, found.state

    def after_step(self, done: int, total: int, stop: Stop, state: dict[str, Any]) -> None:
        """Save if it is time, and after the last step: evaluating and writing may be killed too.

        Raises Interrupted, saved, when any rank was asked to stop.
        """
        stopping = self._world.any(stop.requested)
        due = time.monotonic() - self._saved_at >= self._job.resources.save_every_seconds
        if not (stopping or self._world.any(due or done == total)):
            return
        tensors = self._optimizer.gather()
        if self._world.is_first:
            save_checkpoint(
                self._job.checkpoints, step=done, total=total, tensors=tensors, state=state
            )
        self._world.barrier()
        self._saved_at = time.monotonic()
        if stopping:
            self._progress.message(f"stopped at step {done}/{total}; the same command goes on")
            raise Interrupted
