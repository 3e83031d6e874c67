"""The policy gradient, against a reference written straight from its formula."""

import pytest
import torch

from flows.profiles import open_profile
from nanochat_core import scaling
from nanochat_core.config import ModelConfig
from nanochat_core.model.gpt import GPT
from nanochat_core.runtime.distributed import World
from nanochat_core.train.rl import Rollout, add_policy_gradients, question_ids

pytestmark = pytest.mark.torch
ALONE = World(rank=0, local_rank=0, size=1)


def small_model() -> GPT:
    config = ModelConfig(
        depth=2, width=32, num_heads=2, num_kv_heads=2, sequence_len=32, vocab_size=64,
        windows=(16, 32),
        residual_scalars=True,
        value_embeds=True,
        smear=True,
        backout=True,
    )  # fmt: skip
    model = GPT(config, scaling.numerics("fp32"))
    model.init_weights(1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def rollout(prompt: list[int], answer: list[int], mask: list[int], advantage: float) -> Rollout:
    return Rollout(prompt=prompt, answer=answer, mask=mask, reward=0.0, advantage=advantage)


ROLLOUTS = [
    rollout([1, 2, 3], [4, 5, 6, 7], [1, 1, 0, 1], 0.75),
    rollout([1, 2, 3], [9, 8], [1, 1], -0.25),
    rollout([5, 1], [3, 3, 3, 3, 3], [1, 0, 0, 1, 1], 0.0),
    rollout([7], [11, 12, 13], [1, 1, 1], -0.5),
]


def test_gradients_are_those_of_the_formula() -> None:
    model = small_model()
    add_policy_gradients(model, ROLLOUTS, device_batch_size=2, world=ALONE)
    reference = small_model()
    sampled = sum(sum(r.mask) for r in ROLLOUTS)
    objective = torch.zeros((), dtype=torch.float64)
    for r in ROLLOUTS:
        ids = r.prompt + r.answer
        logp = reference(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
        for i, (token, counts) in enumerate(zip(r.answer, r.mask, strict=True)):
            if counts:
                objective = objective + r.advantage * logp[len(r.prompt) + i - 1, token]
    (-objective / sampled).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_micro_batch_does_not_change_the_gradient() -> None:
    models = [small_model(), small_model()]
    for model, size in zip(models, (1, 4), strict=True):
        add_policy_gradients(model, ROLLOUTS, device_batch_size=size, world=ALONE)
    for one, four in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, four.grad, rtol=1e-4, atol=1e-7)


def test_ranks_share_a_steps_questions_and_an_epoch_asks_each_once() -> None:
    config = open_profile("tiny").run.rl
    whole = question_ids(3, 100, config, 7, ALONE)
    shares = [
        question_ids(3, 100, config, 7, World(rank=r, local_rank=r, size=4)) for r in range(4)
    ]
    assert sorted(whole) == sorted(i for share in shares for i in share)
    steps = 100 // config.examples_per_step
    seen = [i for step in range(steps) for i in question_ids(step, 100, config, 7, ALONE)]
    assert len(set(seen)) == len(seen)
