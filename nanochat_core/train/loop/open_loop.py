"""Open what every training loop works with, so that a stage's own file is data, loss and update.

The order inside a stage: `open_loop`, the stage's data, `Loop.resume`, a first validation,
`Loop.start_steps`, then the steps, written out in the stage. See train/pretrain.py.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat_core.config import ModelConfig, NumericsConfig, OptimizerConfig
from nanochat_core.job import Job
from nanochat_core.model.attention import choose, choose_qk_kernel
from nanochat_core.model.checkpoint import has_state, load_model, load_state, save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.model.layers import activation_dtype
from nanochat_core.model.matrices.gradient import choose_weight_kernel
from nanochat_core.model.shape import head_dim
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import World, open_world
from nanochat_core.runtime.hardware.gc_disabled import gc_disabled
from nanochat_core.runtime.hardware.oom import oom_explained
from nanochat_core.runtime.interrupt import STOP
from nanochat_core.runtime.progress import Progress
from nanochat_core.train.loop.checkpointer import Checkpointer
from nanochat_core.train.loop.metrics import TrainMetrics, pace_of


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The parts of one job's training loop on this rank."""

    world: World
    device: torch.device
    model: GPT  # in training mode
    optimizer: Optimizer
    progress: Progress  # the job's events; rank 0 writes them
    metrics: TrainMetrics
    checkpointer: Checkpointer
    fixed_shape: bool  # steps compute on tensors of few shapes, which can be compiled for
    stack: contextlib.ExitStack  # what `start_steps` enters, left at the end of `open_loop`

    def resume(self, num_steps: int) -> tuple[int, dict[str, Any]]:
        """Load the newest checkpoint if there is one, and report the start of the loop. Collective.

        Returns the number of steps done and the state that the stage saved with them; (0, {})
        without a checkpoint.
        """
        start, state = self.checkpointer.resume(num_steps)
        self.progress.start(num_steps, step=start)
        return start, state

    def report_scores(self, done: int, **scores: float) -> None:
        """Report the scores of the state after `done` steps."""
        self.progress.eval(done, **scores)
        self.metrics.start_timer()  # or the next step would seem to take the evaluation's time

    def start_steps(self) -> None:
        """Prepare for the first step. Call it after everything that a signal may end at once.

        From here to the end of `open_loop` a signal waits until the step is done and saved, and
        garbage is collected only between steps. An evaluation delays the signal too: if it takes
        longer than the alarm allows (runtime/interrupt.py), the job ends without its scores and
        evaluates the same state, which is saved already, when it resumes.
        """
        self.stack.enter_context(STOP.deferred())
        if self.fixed_shape:
            self.stack.enter_context(gc_disabled())
        self.metrics.start_timer()


@contextlib.contextmanager
def open_loop(
    job: Job,
    optimizer_config: OptimizerConfig,
    *,
    init_from: Path | None,
    tokens_per_step: int | None,
) -> Iterator[Loop]:
    """Open the ranks, the device, the model, its optimizer and what watches and saves them.

    `init_from`: directory of the model to continue from, with its optimizer state; None means a
    fresh model of the job's config. `tokens_per_step`: None means that steps differ in shape, so no
    throughput is reported, no level of the loss is watched and nothing is compiled. On leaving
    without an error, waits until the last checkpoint is committed. A lack of memory inside the
    block becomes OutOfMemory. Collective.
    """
    device = open_device(job.resources)
    world = open_world(device)
    progress = Progress(job.events, active=world.is_first)
    model = make_model(job, device) if init_from is None else load_model(init_from, device).train()
    # Collective: all ranks use the first backend that runs on every one of them.
    choose(
        job.resources.attention,
        device,
        activation_dtype(model.numerics.precision, device),
        strict=job.resources.determinism == "strict",
        world=world,
    )
    choose_qk_kernel(job.resources.qk_kernel, device, head_dim(model.config))
    choose_weight_kernel(job.resources.weight_kernel, device, model.numerics.precision)
    optimizer = Optimizer(model, optimizer_config, precision=model.numerics.precision, world=world)
    if init_from is not None:
        load_optimizer_state(optimizer, init_from, progress)
    fixed_shape, pace = tokens_per_step is not None, None
    if tokens_per_step is not None:
        if job.resources.compile:
            model.compile_passes(
                by_block=job.resources.compile == "blocks", autotune=job.resources.autotune
            )
        pace = pace_of(job, model, tokens_per_step=tokens_per_step, device=device, world=world)
    metrics = TrainMetrics(progress, pace, late=fixed_shape and device.type == "cuda")
    checkpointer = Checkpointer(job, optimizer, world, progress, metrics)
    with oom_explained(job.resources), contextlib.ExitStack() as stack:
        yield Loop(
            world=world,
            device=device,
            model=model,
            optimizer=optimizer,
            progress=progress,
            metrics=metrics,
            checkpointer=checkpointer,
            fixed_shape=fixed_shape,
            stack=stack,
        )
        # Before the stack is left: a signal during the last save waits for its end too.
        checkpointer.close()


def save_trained_model(loop: Loop, directory: Path, *, tokenizer: Path, made_by: str) -> None:
    """Write the model and the optimizer's state, from rank 0. Collective.

    `tokenizer`: its directory. `made_by`: the stage's name. Call it after `open_loop` was left.
    """
    # Every rank gathers: each holds a part of the state.
    state = loop.optimizer.gather()
    if loop.world.is_first:
        save_model(directory, loop.model, tokenizer=tokenizer, optimizer=state, made_by=made_by)


def make_model(job: Job, device: torch.device) -> GPT:
    """Return a freshly initialised model of the job's config."""
    numerics = NumericsConfig.from_tree(job.config["numerics"])
    # Shapes alone first: `init_weights` fills every parameter, on the device it is to be on.
    with torch.device("meta"):
        model = GPT(ModelConfig.from_tree(job.config["model"]), numerics)
    model.to_empty(device=device)
    model.init_weights(job.config["seed"])
    return model


def load_optimizer_state(optimizer: Optimizer, directory: Path, progress: Progress) -> None:
    """Continue with the optimizer state of the model in `directory`, if it has one. Collective."""
    if has_state(directory):
        optimizer.load(load_state(directory).__getitem__)
    else:
        progress.message("the model came without an optimizer's state: its moments begin at zero")
