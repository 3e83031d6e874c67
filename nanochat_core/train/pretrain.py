"""Stage `pretrain`: train a base model from packed rows of text.

The plainest of the training loops. A step, from top to bottom: (evaluate,) rows, forward, backward,
update, log, save. What a lack of memory does: runtime/hardware/oom.py; how documents become rows:
data/packing.py; what is summed over the ranks, and when: optim/sharded.py.
"""

import time
from typing import Any

import numpy.typing as npt

from nanochat_core.config import OptimizerConfig, PretrainConfig
from nanochat_core.data.row_files import Rows
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.job import Job
from nanochat_core.optim.schedule import lr_multiplier, muon_momentum, muon_weight_decay
from nanochat_core.scaling import flops_per_token, num_params
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train.loop.fixed_text import fixed_text_loss
from nanochat_core.train.loop.lineage import write_lineage
from nanochat_core.train.loop.open_loop import open_loop, save_trained_model
from nanochat_core.train.loop.prefetch import prefetch
from nanochat_core.train.loop.run_environment import run_environment
from nanochat_core.train.loop.step import micro_steps


def run(job: Job) -> dict[str, Any]:
    """Train, and write the base model. Resumes from the job's newest checkpoint, to the bit."""
    config = PretrainConfig.from_tree(job.config["pretrain"])
    optimizer_config = OptimizerConfig.from_tree(job.config["optimizer"])
    num_steps, tokens_per_step = config.num_steps, config.total_batch_size
    batch_size = job.resources.device_batch_size  # rows of a micro-step
    with open_loop(job, optimizer_config, init_from=None, tokens_per_step=tokens_per_step) as loop:
        model, optimizer, world = loop.model, loop.optimizer, loop.world
        metrics, checkpointer = loop.metrics, loop.checkpointer

        # Data. Rows of another tokenizer would train without an error, and a useless model.
        train, validation = (Rows.open(job.inputs["rows"], split) for split in ("train", "val"))
        tokenizer = Tokenizer.load(job.inputs["tokenizer"])
        train.check_tokenizer(tokenizer.digest())
        train.check_model(
            vocab_size=model.config.vocab_size, sequence_len=model.config.sequence_len
        )
        token_bytes = tokenizer.token_bytes()
        rows_per_step = tokens_per_step // model.config.sequence_len

        # A step's rows follow from its number, so no position in the data has to be saved.
        def take(step: int) -> tuple[npt.NDArray[Any]]:
            seed = job.config["seed"]
            return (train.batch(step, rows_per_step, seed=seed, rank=world.rank, world=world.size),)

        def evaluate(done: int) -> float:
            bpb = bits_per_byte(
                model,
                validation,
                token_bytes,
                num_tokens=config.eval_tokens,
                batch_size=batch_size,
                world=world,
            )
            loop.report_scores(done, val_bpb=bpb)
            return bpb

        start, state = loop.resume(num_steps)
        started = time.monotonic()
        first_bpb = state["first_bpb"] if start else evaluate(0)
        loop.start_steps()
        for step, (tokens,) in prefetch(take, start=start, stop=num_steps, device=loop.device):
            # This state is saved already: a job that ends meanwhile evaluates it when it resumes.
            if checkpointer.is_to_validate(step):
                evaluate(step)
            done = step + 1
            # Forward and backward, of as many rows at a time as the device has memory for. Each
            # token has its share in the mean over all ranks, so that gradients just add up.
            for inputs, targets, last in micro_steps(
                model, tokens, None, device_batch_size=batch_size
            ):
                loss = model.summed_loss(inputs, targets, 1 / tokens_per_step)
                # In the last one the optimizer starts to sum a layer's gradients over the ranks
                # while those of the layers before it are computed.
                optimizer.backward(loss, last=last)
            # Both are summed over the ranks: the loss now, the gradients until `step` needs them.
            loss = optimizer.start_reduce_scatter()
            # Before the update: a loss that is not finite ends the run before it spoils the model.
            metrics.record(done, loss)
            optimizer.step(
                lr_multiplier=config.lr_fraction * lr_multiplier(step, num_steps, config.schedule),
                momentum=muon_momentum(step, num_steps, config.schedule),
                weight_decay=muon_weight_decay(step, num_steps, optimizer_config.muon_weight_decay),
            )
            metrics.flush()
            if checkpointer.is_due(done):
                checkpointer.save(done, {"first_bpb": first_bpb})
        last_bpb = evaluate(num_steps)
    if world.is_first:
        fixed = fixed_text_loss(model, tokenizer)
        write_lineage(job.output, tokenizer=tokenizer.digest(), layout=None, loss=fixed)
    save_trained_model(loop, job.output, tokenizer=job.inputs["tokenizer"], made_by="pretrain")
    return {
        "val_bpb_first": first_bpb,
        "val_bpb": last_bpb,
        "parameters": num_params(model.config, model.numerics),
        "tokens": num_steps * tokens_per_step,
        "flops": num_steps * tokens_per_step * flops_per_token(model.config, model.numerics),
        # Of this execution alone: `started` is not saved.
        "tokens_per_second": (num_steps - start) * tokens_per_step / (time.monotonic() - started),
        **run_environment(job, loop.device, world),
    }
