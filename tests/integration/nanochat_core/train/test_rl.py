"""The RL loop: who is asked what, answers that depend on nothing else, and its options."""

import json
import random
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from flows.profiles import open_profile
from nanochat_core.config import RLConfig
from nanochat_core.data.conversations.examples import open_task
from nanochat_core.engine.engine import Engine
from nanochat_core.evaluate import generate
from nanochat_core.evaluate.generate import pass_at
from nanochat_core.model.checkpoint import load_model, load_state
from nanochat_core.runtime.hardware.distributed import ALONE, World
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.policy import Rollout, log_probs
from nanochat_core.train.rl import question_ids, roll_out
from tests.support.nanochat_core.train.fixtures import are_even

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _paid(monkeypatch):
    monkeypatch.setattr(rl, "are_correct", are_even)
    monkeypatch.setattr(generate, "are_correct", are_even)


def worlds(size):
    return [World(rank=r, local_rank=r, size=size) for r in range(size)]


def engine_of(directory):
    model = load_model(directory, torch.device("cpu"))
    return Engine(model, Tokenizer.load(directory / "tokenizer"))


def test_answers_are_the_same_in_any_company_and_any_world(bench):
    engine = engine_of(bench.models["sft"])
    train = open_task("arithmetic", bench.models["task_data"], "train")
    changes = {"examples_per_step": 6, "samples_per_example": 3}
    settings = RLConfig.from_tree({**bench.config.rl.tree(), **changes})

    def by_question(ids):
        rollouts = roll_out(engine, train, ids, settings, seed=5)
        size = settings.samples_per_example
        return {i: rollouts[n * size : (n + 1) * size] for n, i in enumerate(ids)}

    whole = by_question(question_ids(2, len(train), settings, 7, ALONE))
    assert len({tuple(r.answer) for group in whole.values() for r in group}) > 6
    for size in (2, 3, 6):
        parts = [by_question(question_ids(2, len(train), settings, 7, w)) for w in worlds(size)]
        assert {i: group for part in parts for i, group in part.items()} == whole
    assert by_question(list(reversed(whole))) == whole
    question = next(iter(whole))  # in another step the same question has other answers
    assert roll_out(engine, train, [question], settings, seed=6) != whole[question]


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers():
    rng = random.Random(1)
    for num_samples in range(1, 7):
        answers = [rng.random() < 0.4 for _ in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = list(map(any, combinations(answers, k)))
            found = pass_at(k, correct=sum(answers), num_samples=num_samples)
            assert found == pytest.approx(sum(choices) / len(choices))


def rl_done(bench, folder="job", **section):
    return bench.done("rl", folder, section=section)


def weights(job):
    return {k: v for k, v in load_state(job.output).items() if k.startswith("weight/")}


def same(one, other):
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_k_is_reported_and_a_few_answers_are_written_with_their_rewards(bench):
    section = {"eval_samples": 3, "eval_examples": 8, "samples_per_example": 6}
    job, metrics = rl_done(bench, **section)
    names = [f"pass_at_{k}" for k in (1, 2, 3)]
    evals = bench.values(job, "eval")
    assert any(text.startswith("answers: ") for text in bench.messages(job))
    assert sorted(evals) == [0, 3]
    for values in evals.values():
        assert sorted(values) == names
        assert values["pass_at_1"] <= values["pass_at_2"] <= values["pass_at_3"] <= 1.0
        assert 0 < values["pass_at_1"] < values["pass_at_3"]
    assert {name: metrics[name] for name in names} == evals[3]
    assert metrics["pass_at_1_first"] == evals[0]["pass_at_1"]

    lines = (job.output / "samples.jsonl").read_text(encoding="ascii").splitlines()
    samples = [json.loads(line) for line in lines]
    assert [s["step"] for s in samples] == [step for step in (1, 2, 3) for _ in range(4)]
    for sample in samples:
        assert sample.keys() == {"step", "prompt", "text", "reward"}
        assert sample["reward"] == float(len(sample["text"]) % 2 == 0)
        assert len(sample["text"]) <= rl.SAMPLED_CHARS


def test_sampled_scores_are_the_same_however_many_ranks_share_the_work(bench, monkeypatch):
    engine = engine_of(bench.models["sft"])
    task = open_task("arithmetic", bench.models["task_data"], "test")
    sums = []

    def score(world):
        settings = {"num_samples": 4, "max_new_tokens": 8, "temperature": 1.0, "top_k": 50}
        return generate.sampled_pass_at(engine, task, seed=1, world=world, **settings)

    expected = score(ALONE)

    def collect(self, tensor):
        sums.append(tensor.clone())
        return tensor

    monkeypatch.setattr(World, "sum", collect)
    for world in worlds(3):
        score(world)
    monkeypatch.setattr(World, "sum", lambda self, tensor: sum(sums))
    assert score(ALONE) == expected
    assert 0 < expected[0] < expected[3]


def test_each_option_changes_what_is_learnt(bench):
    options = {
        "plain": {},
        "clip": {"clip": 0.2},
        "two": {"clip": 0.2, "updates_per_batch": 2},
        "kl": {"kl_weight": 0.5},
        "leave_one_out": {"baseline": "leave_one_out"},
        "bf16": {"rollout_precision": "bf16"},
    }
    jobs = {name: rl_done(bench, name, **options[name], num_steps=2)[0] for name in options}
    for name in ("two", "kl", "leave_one_out", "bf16"):
        assert not same(jobs[name], jobs["plain"]), name
    # The weights that sampled are those that learn: the ratio is 1, and nothing is cut off.
    for name, ours in weights(jobs["clip"]).items():
        torch.testing.assert_close(ours, weights(jobs["plain"])[name], rtol=1e-2, atol=1e-3)
    two, plain = (int(load_state(jobs[name].output)["step"]) for name in ("two", "plain"))
    assert two == plain + 2


def test_a_second_update_is_compared_with_the_weights_before_the_first(bench, monkeypatch):
    moved = []  # how far an update's weights are from those that it is compared with
    backward = rl.policy_loss

    def measure(model, rollouts, ids, compared, n):
        if 0 in ids:  # one micro-step of an update
            now = log_probs(model, rollouts, device_batch_size=4)
            model.train()
            moved.append(float((torch.cat(now) - torch.cat(compared.old)).abs().max()))
        return backward(model, rollouts, ids, compared, n)

    monkeypatch.setattr(rl, "policy_loss", measure)
    rl_done(bench, clip=0.2, updates_per_batch=2, num_steps=2)
    assert len(moved) == 4
    assert moved[::2] == [0.0, 0.0]
    assert min(moved[1::2]) > 1e-3


def test_a_step_whose_answers_are_all_empty_updates_nothing(bench, monkeypatch):
    def end_at_once(*given):
        empty = {"answer": [], "mask": [], "reward": 0.0, "advantage": 0.0}
        return [replace(rollout, **empty) for rollout in roll_out(*given)]

    monkeypatch.setattr(rl, "roll_out", end_at_once)
    job, _ = rl_done(bench, kl_weight=0.1, num_steps=2)
    assert [values["answer_tokens"] for values in bench.values(job).values()] == [0.0, 0.0]
    before = load_state(bench.models["sft"])
    assert all(torch.equal(before[name], value) for name, value in weights(job).items())


def test_dropped_groups_do_not_count_and_are_reported(bench, monkeypatch):
    counts = []
    split = rl.micro_batches

    def count(rollouts, *compared, **named):
        counts.append((len(rollouts), sum(not r.advantage for r in rollouts)))
        return split(rollouts, *compared, **named)

    monkeypatch.setattr(rl, "micro_batches", count)

    def paid(task, graded):
        """Half of the questions are too easy."""
        return [len(str(graded[0][0])) % 2 == 0 or even for even in are_even(task, graded)]

    monkeypatch.setattr(rl, "are_correct", paid)
    section = {"examples_per_step": 4, "num_steps": 3}
    kept, _ = rl_done(bench, "kept", **section)
    all_counts, counts = counts, []
    dropped, _ = rl_done(bench, "dropped", **section, drop_equal_groups=True)
    assert all(total == 16 for total, _ in all_counts)
    assert any(useless >= 4 for _, useless in all_counts)
    steps = bench.values(dropped).values()
    sizes = [16 - 4 * int(values["dropped_groups"]) for values in steps]
    assert [total for total, _ in counts] == [size for size in sizes if size]
    assert min(sizes) < 16
    assert not any("dropped_groups" in values for values in bench.values(kept).values())
    assert not same(kept, dropped)


@pytest.mark.parametrize("num_steps", [1, 15, 16, 17, 100, 467])
def test_samples_come_from_few_steps_the_first_and_the_last_among_them(num_steps):
    config = RLConfig.from_tree({**open_profile("tiny").run.rl.tree(), "num_steps": num_steps})
    question = {"messages": [{"role": "user", "content": "x" * 5000}]}
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    answer = Rollout(prompt=[1], answer=[65] * 5000, mask=[1] * 5000, reward=1.0, advantage=0.0)
    lines = [
        line
        for done in range(1, num_steps + 1)
        for line in rl.sample_lines(done, config, question, [answer] * 9, tokenizer)
    ]
    steps = sorted({line["step"] for line in lines})
    assert steps[0] == 1
    assert steps[-1] == num_steps
    assert len(lines) <= (rl.SAMPLED_STEPS + 1) * rl.SAMPLED_ANSWERS
    assert {len(line[key]) for line in lines for key in ("text", "prompt")} == {rl.SAMPLED_CHARS}
