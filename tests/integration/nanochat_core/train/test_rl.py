"""The RL loop: who is asked what, answers that depend on nothing else, and its options."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from flows.profiles import open_profile
from nanochat_core.config import RLConfig, RunConfig
from nanochat_core.data.conversations.examples import open_task
from nanochat_core.engine.engine import Engine
from nanochat_core.errors import ConfigError
from nanochat_core.evaluate import generate
from nanochat_core.evaluate.generate import pass_at
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import load_model, load_state
from nanochat_core.runtime.hardware.distributed import ALONE, World
from nanochat_core.runtime.interrupt import STOP, Interrupted
from nanochat_core.runtime.progress import last_by_step, read_events
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train import rl
from nanochat_core.train.policy import Rollout, log_probs
from nanochat_core.train.rl import question_ids, roll_out
from tasks.base import Conversation

pytestmark = pytest.mark.torch
RunStage: TypeAlias = Callable[[Job], dict[str, Any]]
MakeJob: TypeAlias = Callable[..., Job]


def are_even(task: str, graded: Sequence[tuple[Conversation, str]]) -> list[bool]:
    """A model of this size answers nothing right: pay it for what it does half of the time."""
    return [len(answer) % 2 == 0 for _, answer in graded]


@pytest.fixture(autouse=True)
def _paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl, "are_correct", are_even)
    monkeypatch.setattr(generate, "are_correct", are_even)


def test_ranks_share_a_steps_questions_and_an_epoch_asks_each_once() -> None:
    config = open_profile("tiny").run.rl
    whole = question_ids(3, 100, config, 7, ALONE)
    shares = [question_ids(3, 100, config, 7, world) for world in worlds(4)]
    assert sorted(whole) == sorted(i for share in shares for i in share)
    steps = 100 // config.examples_per_step
    seen = [i for step in range(steps) for i in question_ids(step, 100, config, 7, ALONE)]
    assert len(set(seen)) == len(seen)


def worlds(size: int) -> list[World]:
    return [World(rank=r, local_rank=r, size=size) for r in range(size)]


def test_answers_are_the_same_in_any_company_and_any_world(
    models: dict[str, Path], config: RunConfig
) -> None:
    device = torch.device("cpu")
    engine = Engine(load_model(models["sft"], device), Tokenizer.load(models["sft"] / "tokenizer"))
    train = open_task("arithmetic", models["task_data"], "train")
    settings = rl_config(config, examples_per_step=6, samples_per_example=3)

    def by_question(ids: Sequence[int]) -> dict[int, list[Rollout]]:
        rollouts = roll_out(engine, train, ids, settings, seed=5)
        size = settings.samples_per_example
        return {i: rollouts[n * size : (n + 1) * size] for n, i in enumerate(ids)}

    whole = by_question(question_ids(2, len(train), settings, 7, ALONE))
    assert len({tuple(r.answer) for group in whole.values() for r in group}) > 6
    for size in (2, 3, 6):
        parts = [by_question(question_ids(2, len(train), settings, 7, w)) for w in worlds(size)]
        assert {i: group for part in parts for i, group in part.items()} == whole
    backwards = by_question(list(reversed(whole)))
    assert backwards == whole
    # Of another step, the same question is answered otherwise.
    question = next(iter(whole))
    assert roll_out(engine, train, [question], settings, seed=6) != whole[question]


def rl_config(config: RunConfig, **values: Any) -> RLConfig:
    return RLConfig.from_tree({**config.rl.tree(), **values})


def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers() -> None:
    rng = random.Random(1)
    for num_samples in range(1, 7):
        answers = [rng.random() < 0.4 for _ in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = list(combinations(answers, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            found = pass_at(k, correct=sum(answers), num_samples=num_samples)
            assert found == pytest.approx(share)


def run_rl(
    make_job: MakeJob, run_stage: RunStage, models: dict[str, Path], directory: Path, **section: Any
) -> tuple[Job, dict[str, Any]]:
    job = make_job("rl", directory, models, section=section)
    return job, run_stage(job)


def weights(job: Job) -> dict[str, torch.Tensor]:
    return {k: v for k, v in load_state(job.output).items() if k.startswith("weight/")}


def same(one: Job, other: Job) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_k_is_reported_and_a_few_answers_are_written_with_their_rewards(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    section = {"eval_samples": 3, "eval_examples": 8, "samples_per_example": 6}
    job, metrics = run_rl(make_job, run_stage, models, tmp_path, **section)
    names = [f"pass_at_{k}" for k in (1, 2, 3)]
    evals = last_by_step(read_events(job.events), "eval")
    assert any(e.get("text", "").startswith("answers: ") for e in read_events(job.events))
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


def test_sampled_scores_are_the_same_however_many_ranks_share_the_work(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        load_model(models["sft"], torch.device("cpu")), Tokenizer.load(models["sft"] / "tokenizer")
    )
    task = open_task("arithmetic", models["task_data"], "test")
    sums: list[torch.Tensor] = []

    def score(world: World) -> list[float]:
        return generate.sampled_pass_at(
            engine, task, num_samples=4, max_new_tokens=8, temperature=1.0, top_k=50, seed=1,
            world=world,
        )  # fmt: skip

    expected = score(ALONE)

    def collect(self: World, tensor: torch.Tensor) -> torch.Tensor:
        sums.append(tensor.clone())
        return tensor

    monkeypatch.setattr(World, "sum", collect)
    for world in worlds(3):
        score(world)
    monkeypatch.setattr(World, "sum", lambda self, tensor: sum(sums))
    assert score(ALONE) == expected
    assert 0 < expected[0] < expected[3]


def test_options_at_their_neutral_value_are_not_part_of_the_identity() -> None:
    config = open_profile("tiny").run.rl
    options = (
        "updates_per_batch", "clip", "kl_weight", "baseline", "drop_equal_groups", "eval_samples",
        "rollout_precision",
    )  # fmt: skip
    assert not set(options) & config.canonical().keys()
    changed = RLConfig.from_tree({**config.tree(), "clip": 0.2, "updates_per_batch": 2})
    assert {"clip", "updates_per_batch"} <= changed.canonical().keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"updates_per_batch": 2}, r"rl.updates_per_batch is 2 and rl.clip is null"),
        ({"clip": 0.0}, r"rl.clip is 0.0, expected between 0 and 1"),
        ({"kl_weight": -0.1}, r"rl.kl_weight is -0.1, expected at least 0"),
        ({"baseline": "median"}, r"rl.baseline is 'median'"),
        ({"rollout_precision": "fp8"}, r"rl.rollout_precision is 'fp8'"),
        ({"samples_per_example": 1}, r"rl.samples_per_example is 1, expected at least 2"),
    ],
)
def test_options_that_cannot_be_are_named(values: dict[str, Any], message: str) -> None:
    config = open_profile("tiny").run.rl
    with pytest.raises(ConfigError, match=message):
        RLConfig.from_tree({**config.tree(), **values})


def test_each_option_changes_what_is_learnt(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "clip": {"clip": 0.2},
        "two": {"clip": 0.2, "updates_per_batch": 2},
        "kl": {"kl_weight": 0.5},
        "leave_one_out": {"baseline": "leave_one_out"},
        "bf16": {"rollout_precision": "bf16"},
    }
    jobs = {
        name: run_rl(make_job, run_stage, models, tmp_path / name, **section, num_steps=2)[0]
        for name, section in options.items()
    }
    for name in ("two", "kl", "leave_one_out", "bf16"):
        assert not same(jobs[name], jobs["plain"]), name
    # The weights that sampled are those that learn: the ratio is 1, and nothing is cut off.
    for name, ours in weights(jobs["clip"]).items():
        torch.testing.assert_close(ours, weights(jobs["plain"])[name], rtol=1e-2, atol=1e-3)
    assert int(load_state(jobs["two"].output)["step"]) == 2 + int(
        load_state(jobs["plain"].output)["step"]
    )


def test_a_second_update_is_compared_with_the_weights_before_the_first(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[float] = []  # how far an update's weights are from those that it is compared with
    backward = rl.policy_loss

    def measure(model: Any, rollouts: list[Rollout], ids: list[int], compared: Any, n: Any) -> Any:
        if 0 in ids:  # one micro-step of an update
            now = log_probs(model, rollouts, device_batch_size=4)
            model.train()
            moved.append(float((torch.cat(now) - torch.cat(compared.old)).abs().max()))
        return backward(model, rollouts, ids, compared, n)

    monkeypatch.setattr(rl, "policy_loss", measure)
    section: dict[str, Any] = {"clip": 0.2, "updates_per_batch": 2, "num_steps": 2}
    run_rl(make_job, run_stage, models, tmp_path, **section)
    assert len(moved) == 4
    assert moved[::2] == [0.0, 0.0]
    assert min(moved[1::2]) > 1e-3


def test_with_every_option_a_stopped_run_resumes_to_the_same_bytes(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section: dict[str, Any] = {
        "num_steps": 4,
        "clip": 0.2,
        "updates_per_batch": 2,
        "kl_weight": 0.1,
        "baseline": "leave_one_out",
        "drop_equal_groups": True,
        "eval_samples": 2,
    }
    whole, expected = run_rl(make_job, run_stage, models, tmp_path / "whole", **section)
    with monkeypatch.context() as patch:
        patch.setattr(STOP, "requested", False)
        patch.setattr(STOP, "steps_left", 2)
        with pytest.raises(Interrupted):
            run_rl(make_job, run_stage, models, tmp_path / "parts", **section)
    parts, found = run_rl(make_job, run_stage, models, tmp_path / "parts", **section)
    assert found == expected
    assert any(e["kind"] == "start" and e["resumed"] for e in read_events(parts.events))
    for name in ("model.safetensors", "optimizer.safetensors", "samples.jsonl"):
        assert (parts.output / name).read_bytes() == (whole.output / name).read_bytes(), name


def test_a_strong_pull_of_the_reference_keeps_the_model_near_it(
    models: dict[str, Path], make_job: MakeJob, run_stage: RunStage, tmp_path: Path
) -> None:
    def distance(job: Job) -> float:
        engines = [
            Engine(load_model(d, torch.device("cpu")), Tokenizer.load(d / "tokenizer"))
            for d in (models["sft"], job.output)
        ]
        tokens = torch.arange(2, 66)[None]
        before, after = (engine.model(tokens).detach().log_softmax(-1) for engine in engines)
        return float((before.exp() * (before - after)).sum(-1).mean())

    free, held = (
        run_rl(make_job, run_stage, models, tmp_path / str(w), kl_weight=w, num_steps=4)[0]
        for w in (0.0, 20.0)
    )
    assert distance(held) < 0.9 * distance(free)  # the last bits differ in any case


def test_a_step_whose_answers_are_all_empty_updates_nothing(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_at_once(*given: Any) -> list[Rollout]:
        empty: dict[str, Any] = {"answer": [], "mask": [], "reward": 0.0, "advantage": 0.0}
        return [replace(rollout, **empty) for rollout in roll_out(*given)]

    monkeypatch.setattr(rl, "roll_out", end_at_once)
    job, _ = run_rl(make_job, run_stage, models, tmp_path, kl_weight=0.1, num_steps=2)
    steps = last_by_step(read_events(job.events), "step")
    assert [values["answer_tokens"] for values in steps.values()] == [0.0, 0.0]
    before = load_state(models["sft"])
    assert all(torch.equal(before[name], value) for name, value in weights(job).items())


def test_dropped_groups_do_not_count_and_are_reported(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[tuple[int, int]] = []
    split = rl.micro_batches

    def count(rollouts: list[Rollout], *compared: Any, **named: Any) -> Any:
        useless = sum(not r.advantage for r in rollouts)
        counts.append((len(rollouts), useless))
        return split(rollouts, *compared, **named)

    monkeypatch.setattr(rl, "micro_batches", count)

    def paid(task: str, graded: Sequence[tuple[Conversation, str]]) -> list[bool]:
        """Half of the questions are too easy."""
        return [len(str(graded[0][0])) % 2 == 0 or even for even in are_even(task, graded)]

    monkeypatch.setattr(rl, "are_correct", paid)
    section = {"examples_per_step": 4, "num_steps": 3}
    kept, _ = run_rl(make_job, run_stage, models, tmp_path / "kept", **section)
    all_counts, counts = counts, []
    dropped, _ = run_rl(
        make_job, run_stage, models, tmp_path / "dropped", **section, drop_equal_groups=True
    )
    assert all(total == 16 for total, _ in all_counts)
    assert any(useless >= 4 for _, useless in all_counts)
    told = last_by_step(read_events(dropped.events), "step")
    sizes = [16 - 4 * int(values["dropped_groups"]) for values in told.values()]
    assert [total for total, _ in counts] == [size for size in sizes if size]
    assert min(sizes) < 16
    plain = last_by_step(read_events(kept.events), "step")
    assert not any("dropped_groups" in values for values in plain.values())
    assert not same(kept, dropped)


@pytest.mark.parametrize("num_steps", [1, 15, 16, 17, 100, 467])
def test_samples_come_from_few_steps_the_first_and_the_last_among_them(num_steps: int) -> None:
    config = RLConfig.from_tree({**open_profile("tiny").run.rl.tree(), "num_steps": num_steps})
    question: Conversation = {"messages": [{"role": "user", "content": "x" * 5000}]}
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
    assert {len(line["text"]) for line in lines} == {rl.SAMPLED_CHARS}
    assert {len(line["prompt"]) for line in lines} == {rl.SAMPLED_CHARS}
