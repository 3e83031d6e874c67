"""Stage `rl`: reinforcement learning of the chat model on a task whose answers can be checked.

Simplified GRPO, nanochat's rule. Per step: sample a group of answers to each question, reward each,
and raise the likelihood of the tokens of answers that did better than their group's mean. It is
on-policy, so there is no ratio and no clip; no KL term; advantage = reward - group mean; every
sampled token of the step weighs the same (DAPO, arXiv 2503.14476). Tokens forced by a tool carry no
loss. Options are in `RLConfig`, their formulas in policy.py; with more than one update per batch, a
step here is one batch of answers and so many updates.

Writes, next to the model, samples.jsonl {step, prompt, text, reward}: some answers of some steps.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from nanochat_core.config import OptimizerConfig, RLConfig
from nanochat_core.data.conversations.examples import open_examples, open_task
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate.generate import accuracy, check_machine, sampled_pass_at
from nanochat_core.evaluate.records import write_records
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import load_model
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.progress import Progress
from nanochat_core.runtime.seeding import seed_for
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import parse_answer, render_for_completion
from nanochat_core.train.chat import epoch_order, scaled
from nanochat_core.train.loop.open_loop import Loop, open_loop, save_trained_model
from nanochat_core.train.loop.run_environment import run_environment
from nanochat_core.train.loop.sanity_checks import (
    FIRST_STEPS,
    check_fit,
    open_chat_tokenizer,
    warn_of_rewards,
    write_chat_facts,
)
from nanochat_core.train.policy import (
    ReferenceLogProbs,
    Rollout,
    advantages_of,
    count_sampled,
    drop_equal_groups,
    log_probs,
    micro_batches,
    policy_loss,
)
from tasks.base import Conversation, Task, prompt_of, text_of
from tasks.registry import are_correct

MOMENTUM = 0.95
# samples.jsonl: about so many steps, evenly spread, so many answers of each, so much of each text.
SAMPLED_STEPS, SAMPLED_ANSWERS, SAMPLED_CHARS = 16, 4, 1000


def run(job: Job) -> dict[str, Any]:
    """Train the chat model by RL, and write the result. Resumes to the step, rollouts included."""
    config = RLConfig.from_tree(job.config["rl"])
    optimizer_config = OptimizerConfig.from_tree(job.config["optimizer"])
    seed = seed_for(job.config["seed"], "rl")
    # Before anything is loaded: a machine that cannot grade the answers is found in a second.
    questions, test = open_questions(job, config)
    with open_loop(
        job,
        scaled(optimizer_config, config.lr_fraction),
        init_from=job.model_input,
        tokens_per_step=None,  # an answer has any length
    ) as loop:
        # Answers are sampled in evaluation mode; the gradients' passes switch to training mode.
        model, world = loop.model.eval(), loop.world
        tokenizer = open_chat_tokenizer(job.model_input, model)
        engine = Engine(
            model,
            tokenizer,
            precision=config.rollout_precision,
            on_choice=lambda choice: loop.progress.message(f"answers: {choice}"),
        )

        def evaluate(done: int) -> dict[str, float]:
            scores = evaluate_model(engine, test, config, seed, world)
            loop.report_scores(done, **scores)
            return scores

        start, state = loop.resume(config.num_steps)
        if not start:
            check_fit(job.model_input, model, tokenizer, log=loop.progress.message)
            state = {"first_score": evaluate(0)["pass_at_1"], "rewards": [], "samples": []}
        train(job, loop, engine, questions, start, state, evaluate)
        scores = evaluate(config.num_steps)
    if world.is_first:
        write_records(job.output / "samples.jsonl", state["samples"])
        write_chat_facts(job.output, tokenizer, model)
    save_trained_model(loop, job.output, tokenizer=job.model_input / "tokenizer", made_by="rl")
    return {
        "pass_at_1_first": state["first_score"],
        **scores,
        "steps": config.num_steps,
        **run_environment(job, loop.device, world),
    }


def train(
    job: Job,
    loop: Loop,
    engine: Engine,
    questions: Task,
    start: int,
    state: dict[str, Any],
    evaluate: Callable[[int], object],
) -> None:
    """Take the steps from `start` on. `state`: what is saved with each, which changes in place."""
    config = RLConfig.from_tree(job.config["rl"])
    num_steps, seed = config.num_steps, seed_for(job.config["seed"], "rl")
    model, optimizer, world = loop.model, loop.optimizer, loop.world
    metrics, checkpointer = loop.metrics, loop.checkpointer
    batch_size = job.resources.device_batch_size  # answers of a micro-step
    reference = load_model(job.model_input, loop.device) if config.kl_weight else None
    loop.start_steps()
    for step in range(start, num_steps):
        # This state is saved already: a job that ends meanwhile evaluates it when it resumes.
        if checkpointer.is_to_validate(step):
            evaluate(step)
        done = step + 1
        # Data: answers of the weights as they are now, and their rewards.
        ids = question_ids(step, len(questions), config, seed, world)
        rollouts = roll_out(engine, questions, ids, config, seed_for(seed, step))
        values = summary(rollouts, config, world)
        if world.is_first:
            lines = sample_lines(done, config, questions[ids[0]], rollouts, engine.tokenizer)
            state["samples"] = [*state["samples"], *lines]  # new: a save may read the old list
        if config.drop_equal_groups:
            rollouts = drop_equal_groups(rollouts, config.samples_per_example)
        num_tokens = count_sampled(rollouts, world, loop.device)
        compared = None  # what the ratio and the KL term compare the model with
        if learns := can_learn(values, config):
            compared = make_ref_log_probs(model, reference, rollouts, config, batch_size)
        else:
            metrics.record(done, torch.zeros(()), **values)
        for number in range(config.updates_per_batch if learns else 0):  # on the same answers
            model.train()
            # Forward and backward, of as many answers at a time as the device has memory for.
            for chosen, last in micro_batches(rollouts, compared, device_batch_size=batch_size):
                loss = policy_loss(model, rollouts, chosen, compared, num_tokens)
                optimizer.backward(loss, last=last)
            objective = optimizer.start_reduce_scatter()
            model.eval()
            if number == 0:  # later weights have moved, on answers that they did not sample
                metrics.record(done, objective, **values)
            rate = 1.0 - step / num_steps
            optimizer.step(lr_multiplier=rate, momentum=MOMENTUM, weight_decay=0.0)
        # The engine samples from weights laid out for decoding: they follow the model's.
        engine.refresh()
        metrics.flush()
        state["rewards"] = track_reward(state["rewards"], values["reward"], loop.progress)
        if checkpointer.is_due(done):
            checkpointer.save(done, state)


def open_questions(job: Job, config: RLConfig) -> tuple[Task, Task]:
    """Open the questions to train on and those to evaluate with.

    Raises StageError if this machine cannot grade answers to them, DataError if there are none.
    """
    check_machine(config.task)
    train = open_examples(config.task, job.inputs["task_data"], "train")
    test = open_task(config.task, job.inputs["task_data"], "test")
    return train, test.first(config.eval_examples)


def evaluate_model(
    engine: Engine, test: Task, config: RLConfig, seed: int, world: World
) -> dict[str, float]:
    """Return pass@1 of greedy answers; or pass@k of sampled ones for every k up to eval_samples.

    Every call has the same questions and random numbers, so that scores compare.
    """
    if config.eval_samples == 1:
        score = accuracy(engine, test, max_new_tokens=config.max_new_tokens, world=world)
        return {"pass_at_1": score}
    scores = sampled_pass_at(
        engine,
        test,
        num_samples=config.eval_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seed=seed_for(seed, "evaluation"),
        world=world,
    )
    return {f"pass_at_{k}": score for k, score in enumerate(scores, start=1)}


def question_ids(
    step: int, num_examples: int, config: RLConfig, seed: int, world: World
) -> list[int]:
    """Return this rank's questions of a step, from a seeded order of the training split."""
    # A function of the step alone: resuming needs no position. A step may span two epochs.
    first = step * config.examples_per_step
    ids: list[int] = []
    for i in range(first + world.rank, first + config.examples_per_step, world.size):
        epoch, position = divmod(i, num_examples)
        ids.append(int(epoch_order(num_examples, seed, epoch)[position]))
    return ids


def roll_out(
    engine: Engine, train: Task, ids: Sequence[int], config: RLConfig, seed: int
) -> list[Rollout]:
    """Sample and reward a group of answers to each of the questions `ids`, in one batch.

    A group's answers share the keys and values of their prompt, which is computed once.

    `seed` is the step's: an answer depends on it, on its question's id and on its index in the
    group, not on what else is in the batch.
    """
    prompts = [render_for_completion(engine.tokenizer, train[i]) for i in ids]
    groups = engine.complete(
        prompts,
        num_samples=config.samples_per_example,
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        seeds=[seed_for(seed, i) for i in ids],
    )
    rollouts: list[Rollout] = []
    for i, prompt, group in zip(ids, prompts, groups, strict=True):
        answers = [parse_answer(engine.tokenizer, completion.ids) for completion in group]
        rewards = [*map(float, are_correct(config.task, [(train[i], a) for a in answers]))]
        rollouts += [
            Rollout(
                prompt=prompt,
                answer=completion.ids,
                mask=completion.mask,
                reward=reward,
                advantage=advantage,
            )
            for completion, reward, advantage in zip(
                group, rewards, advantages_of(rewards, config.baseline), strict=True
            )
        ]
    return rollouts


def can_learn(values: dict[str, float], config: RLConfig) -> bool:
    """Return whether a step with these values of `summary` has a gradient, the same on all ranks.

    If all answers ended at once none has one. Where the rewards of no group differ there is nothing
    to learn, but from a reference model: its KL term has a gradient for every token.
    """
    is_pulled = config.kl_weight > 0 and not config.drop_equal_groups
    return values["answer_tokens"] > 0 and (values["useful_share"] > 0 or is_pulled)


def make_ref_log_probs(
    model: GPT,
    reference: GPT | None,
    rollouts: Sequence[Rollout],
    config: RLConfig,
    device_batch_size: int,
) -> ReferenceLogProbs | None:
    """Compute the log-probabilities that the updates on these answers are compared with.

    None: one update without clip and KL needs none, as the ratio is 1.
    """
    if config.clip is None and reference is None:
        return None
    compute = partial(log_probs, rollouts=rollouts, device_batch_size=device_batch_size)
    return ReferenceLogProbs(
        # With one update the weights are those that sampled.
        old=compute(model) if config.updates_per_batch > 1 else None,
        reference=None if reference is None else compute(reference),
        clip=config.clip,
        kl_weight=config.kl_weight,
    )


def summary(rollouts: Sequence[Rollout], config: RLConfig, world: World) -> dict[str, float]:
    """Return the numbers of a step that are reported, over all ranks. Collective."""
    group_size = config.samples_per_example
    differing = len(drop_equal_groups(rollouts, group_size)) // group_size
    rows = [[r.reward, float(len(r.answer)), float(r.advantage != 0), 1.0] for r in rollouts]
    sums = torch.tensor(rows).reshape(-1, 4).sum(0)  # a rank without a question has no rollout
    equal = torch.tensor([len(rollouts) / group_size - differing])
    # One collective for all of them.
    reward, tokens, useful, count, equal_groups = world.sum(torch.cat([sums, equal])).tolist()
    values = {
        "reward": reward / count,
        "answer_tokens": tokens / count,
        "useful_share": useful / count,
    }
    return {**values, "dropped_groups": equal_groups} if config.drop_equal_groups else values


def track_reward(rewards: list[float], reward: float, progress: Progress) -> list[float]:
    """Return the mean rewards of a run's first steps with one more; warn if all are equal."""
    if len(rewards) == FIRST_STEPS:
        return rewards
    rewards = [*rewards, reward]
    if warning := warn_of_rewards(rewards):
        progress.message(warning)
    return rewards


def sample_lines(
    done: int,
    config: RLConfig,
    question: Conversation,
    rollouts: Sequence[Rollout],
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Return the step's lines of samples.jsonl: first answers to its first question; [] mostly."""
    if (done - 1) % math.ceil(config.num_steps / SAMPLED_STEPS) and done != config.num_steps:
        return []
    prompt = text_of(prompt_of(question)["messages"][-1]["content"])
    return [
        {
            "step": done,
            "prompt": prompt[:SAMPLED_CHARS],
            "text": parse_answer(tokenizer, rollout.answer)[:SAMPLED_CHARS],
            "reward": rollout.reward,
        }
        for rollout in rollouts[:SAMPLED_ANSWERS]
    ]
