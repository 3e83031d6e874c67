"""Stage `pretrain`: a base model from packed rows of text."""

import time
from typing import Any

import numpy.typing as npt
import torch

from nanochat_core.config import ModelConfig, NumericsConfig, OptimizerConfig, PretrainConfig
from nanochat_core.data.row_files import Rows
from nanochat_core.evaluate.bits_per_byte import bits_per_byte
from nanochat_core.job import Job
from nanochat_core.model.attention import choose
from nanochat_core.model.checkpoint import Tensors, save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.schedule import lr_multiplier, muon_momentum, muon_weight_decay
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.device import open_device
from nanochat_core.runtime.hardware.distributed import open_world
from nanochat_core.runtime.hardware.gc_disabled import frozen
from nanochat_core.runtime.interrupt import STOP
from nanochat_core.runtime.progress import Progress
from nanochat_core.scaling import flops_per_token, num_params
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train.loop.checkpointer import Checkpointer
from nanochat_core.train.loop.lineage import write_lineage
from nanochat_core.train.loop.metrics import TrainMetrics, pace_of
from nanochat_core.train.loop.oom import OomRetry
from nanochat_core.train.loop.prefetch import prefetch
from nanochat_core.train.loop.run_environment import run_environment
from nanochat_core.train.loop.step import accumulate_gradients


def run(job: Job) -> dict[str, Any]:
    """Train, and write the base model. Resumes from the job's newest checkpoint, to the bit."""
    config = PretrainConfig.from_tree(job.config["pretrain"])
    optimizer_config = OptimizerConfig.from_tree(job.config["optimizer"])
    seed = job.config["seed"]
    world = open_world(job.resources.device)
    device = open_device(job.resources, local_rank=world.local_rank)
    model = make_model(job, device)
    choose(
        job.resources.attention,
        device,
        model.dtype,
        strict=job.resources.determinism == "strict",
        world=world,
    )
    optimizer = Optimizer(model, optimizer_config, precision=model.numerics.precision, world=world)
    if job.resources.compile:
        model.compile_passes()
    train, validation = (Rows.open(job.inputs["rows"], split) for split in ("train", "val"))
    tokenizer = Tokenizer.load(job.inputs["tokenizer"])
    train.check_tokenizer(tokenizer.digest())
    train.check_model(vocab_size=model.config.vocab_size, sequence_len=model.config.sequence_len)
    token_bytes = tokenizer.token_bytes()
    progress = Progress(job.events, active=world.is_first)
    pace = pace_of(job, model, tokens_per_step=config.total_batch_size, device=device, world=world)
    log = TrainMetrics(progress, pace, late=device.type == "cuda")
    keeper = Checkpointer(job, optimizer, world, progress, log)

    def evaluate(done: int) -> float:
        bpb = bits_per_byte(
            model,
            validation,
            token_bytes,
            num_tokens=config.eval_tokens,
            batch_size=fitting.size,
            world=world,
        )
        progress.eval(done, val_bpb=bpb)
        keeper.judge(done, bpb)
        return bpb

    rows_per_step = config.total_batch_size // model.config.sequence_len

    def take(step: int) -> tuple[npt.NDArray[Any]]:
        return (train.batch(step, rows_per_step, seed=seed, rank=world.rank, world=world.size),)

    start, state = keeper.resume()
    fitting = OomRetry(job, optimizer, world, progress, state)
    progress.start(config.num_steps, step=start)
    started = time.monotonic()
    first_bpb = state["first_bpb"] if start else evaluate(0)
    if keeper.is_judged(start, config.num_steps):
        evaluate(start)
    with STOP.deferred(), frozen(), fitting.explain_oom():
        log.begin()
        for step, (tokens,) in prefetch(take, start=start, stop=config.num_steps, device=device):
            done = step + 1
            loss = fitting.gradients(
                accumulate_gradients(model, optimizer, tokens, None, world=world)
            )
            log.read(done, loss)
            optimizer.step(
                lr_multiplier=lr_multiplier(step, config.num_steps, config.schedule),
                momentum=muon_momentum(step, config.num_steps, config.schedule),
                weight_decay=muon_weight_decay(
                    step, config.num_steps, optimizer_config.muon_weight_decay
                ),
            )
            log.tell()
            state = {"first_bpb": first_bpb, **fitting.state()}
            if keeper.maybe_save(done, config.num_steps, state):
                evaluate(done)
                log.begin()
        last_bpb = evaluate(config.num_steps)
        keeper.close()
    state = optimizer.gather()
    if world.is_first:
        write_output(job, model, tokenizer, optimizer=state)
    trained = (config.num_steps - start) * config.total_batch_size
    return {
        "val_bpb_first": first_bpb,
        "val_bpb": last_bpb,
        "parameters": num_params(model.config, model.numerics),
        "tokens": config.num_steps * config.total_batch_size,
        "flops": config.num_steps
        * config.total_batch_size
        * flops_per_token(model.config, model.numerics),
        "tokens_per_second": trained / (time.monotonic() - started),
        **run_environment(job, device, world, device_batch_size=fitting.size),
    }


def write_output(job: Job, model: GPT, tokenizer: Tokenizer, *, optimizer: Tensors) -> None:
    """The model, and what it was taught with."""
    write_lineage(job.output, tokenizer=tokenizer.digest(), layout=None)
    save_model(
        job.output,
        model,
        tokenizer=job.inputs["tokenizer"],
        optimizer=optimizer,
        made_by="pretrain",
    )


def make_model(job: Job, device: torch.device) -> GPT:
    """A freshly initialised model of the job's config."""
    numerics = NumericsConfig.from_tree(job.config["numerics"])
    with torch.device("meta"):
        model = GPT(ModelConfig.from_tree(job.config["model"]), numerics)
    model.to_empty(device=device)
    model.init_weights(job.config["seed"])
    return model
