"""Stage `rl`: the chat model is reinforced on a task whose answers can be checked.

Simplified GRPO, nanochat's rule. Per step: sample a group of answers to each question, reward each,
and raise the likelihood of the tokens of answers that did better than their group's mean. It is
on-policy, so there is no ratio and no clip; no KL term; advantage = reward - group mean; every
sampled token of the step weighs the same (DAPO, arXiv 2503.14476). Tokens forced by a tool carry no
loss.

Shapes: P questions, G samples of each, T tokens. `tokens_RT` has R = P * G rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nanochat_core.config import OptimizerConfig, RLConfig
from nanochat_core.data.examples import open_task
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate.generate import accuracy
from nanochat_core.job import Job
from nanochat_core.model.attention import choose
from nanochat_core.model.checkpoint import load_model, load_state, save_model
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.device import open_device
from nanochat_core.runtime.distributed import World, open_world
from nanochat_core.runtime.interrupt import STOP
from nanochat_core.runtime.progress import Progress
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import parse_answer, render_for_completion
from nanochat_core.train.conversations import scaled
from nanochat_core.train.fitting import Fitting
from nanochat_core.train.keeper import Keeper
from nanochat_core.train.losses import StepLog
from nanochat_core.train.machine import machine
from nanochat_core.train.step import IGNORE
from tasks.base import Conversation
from tasks.registry import is_correct

MOMENTUM = 0.95


def run(job: Job) -> dict[str, Any]:
    """Reinforce the chat model, and write the result. Resumes to the step, rollouts included."""
    config = RLConfig.from_tree(job.config["rl"])
    optimizer_config = OptimizerConfig.from_tree(job.config["optimizer"])
    seed = seed_for(job.config["seed"], "rl")
    world = open_world(job.resources.device)
    device = open_device(job.resources, local_rank=world.local_rank)
    progress = Progress(job.events, active=world.is_first)
    model = load_model(job.model_input, device)
    choose(job.resources.attention, device, model.dtype)
    optimizer = Optimizer(
        model,
        scaled(optimizer_config, config.lr_fraction),
        precision=model.numerics.precision,
        world=world,
    )
    optimizer.load(load_state(job.model_input).__getitem__)
    tokenizer = Tokenizer.load(job.model_input / "tokenizer")
    engine = Engine(model, tokenizer)
    train = open_task(config.task, job.inputs["task_data"], "train")
    test = open_task(config.task, job.inputs["task_data"], "test").first(config.eval_examples)
    log = StepLog(progress, None, late=False)
    keeper = Keeper(job, optimizer, world, progress, log)
    fitting = Fitting(job, optimizer, world, progress)

    def evaluate(done: int) -> float:
        score = accuracy(engine, test, max_new_tokens=config.max_new_tokens, world=world)
        progress.eval(done, pass_at_1=score)
        keeper.judge(done, -score)
        return score

    start, state = keeper.resume()
    progress.start(config.num_steps, step=start)
    first_score = state["first_score"] if start else evaluate(0)
    with STOP.deferred():
        log.begin()
        for step in range(start, config.num_steps):
            questions = [train[i] for i in question_ids(step, len(train), config, seed, world)]
            rollouts = roll_out(engine, tokenizer, questions, config, seed_for(seed, step))
            values = summary(rollouts, world)
            if values["useful_share"] > 0:  # else every group agrees and there is nothing to learn
                objective = fitting.gradients(
                    partial(add_policy_gradients, model, optimizer, rollouts, world=world)
                )
                log.read(step + 1, objective, **values)
                optimizer.step(
                    lr_multiplier=1.0 - step / config.num_steps,
                    momentum=MOMENTUM,
                    weight_decay=0.0,
                )
            else:
                log.read(step + 1, torch.zeros(()), **values)
            log.tell()
            done = step + 1
            judged = _is_due(done, job.resources.eval_every_steps) and done < config.num_steps
            keeper.after_step(done, config.num_steps, {"first_score": first_score}, now=judged)
            if judged:
                evaluate(done)
                log.begin()
        last_score = evaluate(config.num_steps)
        keeper.close()
    state = optimizer.gather()
    if world.is_first:
        save_model(
            job.output,
            model,
            tokenizer=job.model_input / "tokenizer",
            optimizer=state,
            made_by="rl",
        )
    return {
        "pass_at_1_first": first_score,
        "pass_at_1": last_score,
        "steps": config.num_steps,
        **machine(job, device, world, device_batch_size=fitting.size),
    }


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled answer."""

    prompt: list[int]
    answer: list[int]
    mask: list[int]  # of `answer`: 1 sampled, 0 forced by a tool
    reward: float
    advantage: float  # reward - mean reward of the group


def question_ids(
    step: int, num_examples: int, config: RLConfig, seed: int, world: World
) -> list[int]:
    """This rank's questions of a step, taken from a seeded order of the training split."""
    first = step * config.examples_per_step
    ids: list[int] = []
    for i in range(first + world.rank, first + config.examples_per_step, world.size):
        epoch, position = divmod(i, num_examples)
        generator = torch.Generator().manual_seed(seed_for(seed, "epoch", epoch))
        ids.append(int(torch.randperm(num_examples, generator=generator)[position]))
    return ids


def roll_out(
    engine: Engine,
    tokenizer: Tokenizer,
    questions: Sequence[Conversation],
    config: RLConfig,
    seed: int,
) -> list[Rollout]:
    """Sample and reward a group of answers to every question, all in flight together."""
    prompts = [render_for_completion(tokenizer, question) for question in questions]
    groups = engine.complete(
        prompts,
        num_samples=config.samples_per_example,
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seeds=[seed_for(seed, *prompt) for prompt in prompts],
    )
    rollouts: list[Rollout] = []
    for question, prompt, group in zip(questions, prompts, groups, strict=True):
        rewards = [
            float(is_correct(config.task, question, parse_answer(tokenizer, answer.ids)))
            for answer in group
        ]
        mean = sum(rewards) / len(rewards)
        rollouts += [
            Rollout(
                prompt=prompt,
                answer=answer.ids,
                mask=answer.mask,
                reward=reward,
                advantage=reward - mean,
            )
            for answer, reward in zip(group, rewards, strict=True)
        ]
    return rollouts


def add_policy_gradients(
    model: GPT,
    optimizer: Optimizer,
    rollouts: Sequence[Rollout],
    *,
    device_batch_size: int,
    world: World,
) -> torch.Tensor:
    """Give the optimizer the gradients of the objective; returns this rank's share of its value.

    The objective is -sum(advantage * log p(token)) / number of sampled tokens on all ranks.
    Answers whose advantage is zero carry no gradient and are not run; their tokens still count.
    """
    device = next(model.parameters()).device
    sampled = torch.tensor(float(sum(sum(r.mask) for r in rollouts)), device=device)
    count = world.sum(sampled).clamp(min=1)
    total = torch.zeros((), device=device)
    useful = sorted((r for r in rollouts if r.advantage), key=lambda r: len(r.prompt + r.answer))
    model.train()
    for first in range(0, len(useful), device_batch_size):
        batch = useful[first : first + device_batch_size]
        tokens_RT, targets_RT = (t.to(device) for t in pad(batch, model.config.sequence_len))
        advantage_R = torch.tensor([r.advantage for r in batch], device=device)
        loss = model.summed_loss(tokens_RT, targets_RT, advantage_R[:, None]) / count
        optimizer.backward(loss, last=first + device_batch_size >= len(useful))
        total += loss.detach()
    optimizer.start_sums()
    model.eval()
    return total


def pad(batch: Sequence[Rollout], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (R, T) int64, padded on the right; only sampled tokens are targets."""
    length = min(max(len(r.prompt) + len(r.answer) for r in batch) - 1, longest)
    tokens_RT = torch.zeros(len(batch), length, dtype=torch.int64)
    targets_RT = torch.full((len(batch), length), IGNORE, dtype=torch.int64)
    for i, r in enumerate(batch):
        ids = torch.tensor(r.prompt + r.answer)
        mask = torch.tensor([0] * len(r.prompt) + r.mask)
        n = min(len(ids) - 1, length)
        tokens_RT[i, :n] = ids[:n]
        targets_RT[i, :n] = ids[1 : n + 1].masked_fill(mask[1 : n + 1] == 0, IGNORE)
    return tokens_RT, targets_RT


def summary(rollouts: Sequence[Rollout], world: World) -> dict[str, float]:
    """Numbers of a step for people to watch, over all ranks."""
    sums = torch.tensor(
        [[r.reward, float(len(r.answer)), float(r.advantage != 0), 1.0] for r in rollouts]
    )
    sums = sums.reshape(-1, 4).sum(0)  # a rank without a question has no rollout
    reward, tokens, useful, count = world.sum(sums).tolist()
    return {
        "reward": reward / count,
        "answer_tokens": tokens / count,
        "useful_share": useful / count,
    }
