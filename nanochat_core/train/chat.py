"""Train on rendered conversations: the loop that `midtrain` and `sft` share.

The two stages differ in their config section and in the model they start from; everything else is
this loop, so that they cannot drift apart. Only the assistant's tokens carry loss.
"""

import math
import shutil
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F

from nanochat_core.config import ChatTrainConfig, OptimizerConfig
from nanochat_core.data.conversations.chat_rows import ChatRows, conversation_rows
from nanochat_core.data.conversations.examples import open_task
from nanochat_core.errors import DataError
from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.schedule import lr_multiplier, muon_momentum
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import World, open_world
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.train.loop.lineage import FILE
from nanochat_core.train.loop.open_loop import open_loop, save_trained_model
from nanochat_core.train.loop.prefetch import prefetch
from nanochat_core.train.loop.run_environment import run_environment
from nanochat_core.train.loop.sanity_checks import (
    check_fit,
    open_chat_tokenizer,
    write_chat_facts,
)
from nanochat_core.train.loop.step import IGNORE, micro_steps, share_of_targets
from tasks.mixtures.mixture import mixture


def train_on_conversations(job: Job, section: str) -> dict[str, Any]:
    """Train the input model on the mixture of config section `section`, and write the result."""
    config = ChatTrainConfig.from_tree(job.config[section])
    if not config.mixture:
        return copy_model(job)
    seed, batch_size = seed_for(job.config["seed"], section), job.resources.device_batch_size
    with open_loop(
        job,
        scaled(OptimizerConfig.from_tree(job.config["optimizer"]), config.lr_fraction),
        init_from=job.model_input,
        tokens_per_step=config.total_batch_size,
    ) as loop:
        model, optimizer, world = loop.model, loop.optimizer, loop.world
        metrics, checkpointer = loop.metrics, loop.checkpointer

        # Data: conversations packed into rows, each epoch in its own order.
        tokenizer = open_chat_tokenizer(job.model_input, model)
        train, held_out = make_rows(
            job, config, model.config.sequence_len, seed, world, log=loop.progress.message
        )
        rows_per_step = config.total_batch_size // model.config.sequence_len
        num_steps = config.num_epochs * math.ceil(len(train.tokens) / rows_per_step)

        # A step's rows follow from its number, so no position in the data has to be saved.
        def take_step(step: int) -> tuple[npt.NDArray[Any], ...]:
            ids = epoch_ids(step, len(train.tokens), rows_per_step, seed)
            return train.take(share_of(ids, world).numpy())

        def evaluate(done: int) -> float:
            loss = mean_loss(model, held_out, batch_size, world)
            loop.report_scores(done, val_loss=loss)
            return loss

        start, state = loop.resume(num_steps)
        if not start:
            check_fit(job.model_input, model, tokenizer, log=loop.progress.message)
        started = time.monotonic()
        first_loss = state["first_loss"] if start else evaluate(0)
        loop.start_steps()
        feed = prefetch(take_step, start=start, stop=num_steps, device=loop.device)
        for step, (tokens, mask) in feed:
            # This state is saved already: a job that ends meanwhile evaluates it when it resumes.
            if checkpointer.is_to_validate(step):
                evaluate(step)
            done, share = step + 1, share_of_targets(mask, world)
            # Forward and backward, of as many rows at a time as the device has memory for.
            for inputs, targets, last in micro_steps(
                model, tokens, mask, device_batch_size=batch_size
            ):
                loss = model.summed_loss(inputs, targets, share)
                optimizer.backward(loss, last=last)
            # Both are summed over the ranks: the loss now, the gradients until `step` needs them.
            loss = optimizer.start_reduce_scatter()
            # Before the update: a loss that is not finite ends the run before it spoils the model.
            metrics.record(done, loss)
            optimizer.step(
                lr_multiplier=lr_multiplier(step, num_steps, config.schedule),
                momentum=muon_momentum(step, num_steps, config.schedule),
                weight_decay=0.0,  # only pretraining decays weights
            )
            metrics.flush()
            if checkpointer.is_due(done):
                checkpointer.save(done, {"first_loss": first_loss})
        last_loss = evaluate(num_steps)
    if world.is_first:
        write_chat_facts(job.output, tokenizer, model)
    save_trained_model(loop, job.output, tokenizer=job.model_input / "tokenizer", made_by=section)
    return {
        "val_loss_first": first_loss,
        "val_loss": last_loss,
        "steps": num_steps,
        "rows": len(train.tokens),
        "seconds": time.monotonic() - started,
        **run_environment(job, loop.device, world),
    }


def copy_model(job: Job) -> dict[str, Any]:
    """Write the input model as the stage's own output: the result of an empty mixture.

    So a recipe can leave out midtraining: SFT then starts from the base model.
    """
    # Nothing is computed; a placement whose GPU is missing fails here as it would in training.
    world = open_world(open_device(job.resources))
    progress = Progress(job.events, active=world.is_first)
    progress.message("the mixture is empty: the model is passed on as it is")
    if world.is_first:
        names = ("model.safetensors", "optimizer.safetensors", FILE, "config.json")
        shutil.copytree(
            job.model_input / "tokenizer",
            job.output / "tokenizer",
            copy_function=shutil.copyfile,
            dirs_exist_ok=True,
        )
        for name in names:  # the config last: with it the directory is a model
            if (job.model_input / name).exists():
                shutil.copyfile(job.model_input / name, job.output / name)
    return {"steps": 0}


def scaled(config: OptimizerConfig, fraction: float) -> OptimizerConfig:
    """Return the config after pretraining: every learning rate times `fraction`, no clipping."""
    tree = {
        name: value * fraction if name.endswith("_lr") else value
        for name, value in vars(config).items()
    }
    return OptimizerConfig(**{**tree, "grad_clip": None})


def make_rows(
    job: Job,
    config: ChatTrainConfig,
    sequence_len: int,
    seed: int,
    world: World,
    *,
    log: Callable[[str], None],
) -> tuple[ChatRows, ChatRows]:
    """Pack rows of sequence_len + 1 tokens: the training mixture, and held-out conversations.

    One rank of a node writes them below the job's directory, and all of them map the files.
    `log` gets a line now and then. Raises DataError if a task has too few examples, or if none is
    held out. Collective.
    """
    directory = job.inputs["task_data"]
    parts = []
    for entry in config.mixture:
        task = open_task(entry.task, directory, "train")
        stop = None if entry.num_examples is None else entry.skip + entry.num_examples
        if len(task) < (needed := stop or entry.skip + 1):
            raise DataError(
                f"the mixture asks for {needed} examples of {entry.task}, "
                f"task_data has {len(task)}",
                hint=f"raise num_train of {entry.task} in task_data, or lower num_examples",
            )
        parts.append((task.sliced(entry.skip, stop), entry.epochs))
    train = mixture(parts, seed)
    tests = [open_task(entry.task, directory, "test") for entry in config.mixture]
    held_out = mixture([(task, 1) for task in tests], seed)[: config.eval_examples]
    if not len(held_out):
        raise DataError(
            "the mixture has no conversation to test with, for the validation loss",
            hint='raise num_test of a task, or give lines of your own file "split": "test"',
        )
    pack = partial(
        conversation_rows,
        tokenizer=job.model_input / "tokenizer",
        row_len=sequence_len + 1,  # the last token is only a target
        writes=world.local_rank == 0,
        barrier=world.barrier,
        log=log,
    )
    scratch = job.directory / "scratch"
    return pack(train, directory=scratch / "train"), pack(held_out, directory=scratch / "held_out")


def epoch_ids(step: int, num_rows: int, rows_per_step: int, seed: int) -> torch.Tensor:
    """Return the row ids of a step.

    An epoch visits each row once, in an order of its own; its last step may be short.
    """
    steps_per_epoch = math.ceil(num_rows / rows_per_step)
    epoch, position = divmod(step, steps_per_epoch)
    order = epoch_order(num_rows, seed, epoch)
    return order[position * rows_per_step :][:rows_per_step]


@lru_cache(maxsize=2)  # a step may span two epochs
def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the numbers below `count` in the order of an epoch (count,), which callers share."""
    generator = torch.Generator().manual_seed(seed_for(seed, "epoch", epoch))
    return torch.randperm(count, generator=generator)


def share_of(ids: torch.Tensor, world: World) -> torch.Tensor:
    """Return every world-size-th id, starting at this rank."""
    return ids[world.rank :: world.size]


@torch.no_grad()
def mean_loss(model: GPT, rows: ChatRows, batch_size: int, world: World) -> float:
    """Return nats per supervised token over all rows. Collective."""
    model.eval()
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens
    for ids in share_of(torch.arange(len(rows.tokens)), world).split(batch_size):
        HEARTBEAT.beat("evaluating")
        tokens, mask = (torch.from_numpy(part).to(device).long() for part in rows.take(ids.numpy()))
        missing = batch_size - len(ids)
        if missing and model.is_compiled:  # kernels for another shape would take minutes to compile
            tokens, mask = (F.pad(part, (0, 0, 0, missing)) for part in (tokens, mask))
        targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORE)
        sums[0] += model.token_losses(tokens[:, :-1], targets).sum()
        sums[1] += (targets != IGNORE).sum()
    # Ranks have unequal numbers of tokens, so both are summed before the division.
    world.sum(sums)
    model.train()
    return float(sums[0] / sums[1])
