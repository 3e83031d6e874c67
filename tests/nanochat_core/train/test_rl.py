"""The policy gradient, against a reference written straight from its formula."""

import pytest
import torch

from flows.profiles import open_profile
from nanochat_core import scaling
from nanochat_core.config import ModelConfig
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.distributed import ALONE, World
from nanochat_core.train.rl import Rollout, add_policy_gradients, question_ids

pytestmark = pytest.mark.torch


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


def policy_gradients(device_batch_size: int) -> dict[str, torch.Tensor]:
    model = small_model()
    rates = open_profile("tiny").run.optimizer
    optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
    add_policy_gradients(
        model, optimizer, ROLLOUTS, device_batch_size=device_batch_size, world=ALONE
    )
    return optimizer.gradients()


def test_gradients_are_those_of_the_formula() -> None:
    gradients = policy_gradients(2)
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
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, ours in gradients.items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_micro_batch_does_not_change_the_gradient() -> None:
    one, four = policy_gradients(1), policy_gradients(4)
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-4, atol=1e-7)


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
