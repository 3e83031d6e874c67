"""Both of nanochat's ways to a chat model: midtraining and SFT, as in January 2026, or one SFT."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.profiles import open_profile
from nanochat_core.config import ChatTrainConfig
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import load_state
from nanochat_core.optim.schedule import lr_multiplier, muon_momentum
from nanochat_core.runtime.progress import last_by_step, read_events
from nanochat_core.train.loop import open_loop

pytestmark = pytest.mark.torch
# What turns a profile's chat stages into today's nanochat's; its batch is the base model's.
SINGLE_SFT = (
    "midtrain.mixture=[]",
    "sft.mixture=sft-without-midtraining",
    "sft.schedule.warmdown_fraction=0.5",
    "sft.total_batch_size=524288",
)


def rates(config: ChatTrainConfig, num_steps: int) -> list[float]:
    return [lr_multiplier(step, num_steps, config.schedule) for step in range(num_steps)]


def falling(num_steps: int, *, after: float) -> list[float]:
    """1 up to a share of the run, then linear to 0 at its end."""
    places = [step / num_steps for step in range(num_steps)]
    return [1.0 if place <= after else (1 - place) / (1 - after) for place in places]


@pytest.mark.parametrize("name", ["d20_seed", "d12", "speedrun"])
def test_midtraining_holds_its_rate_for_four_fifths_and_sft_falls_from_the_start(name: str) -> None:
    run = open_profile(name).run
    assert rates(run.midtrain, 1000) == pytest.approx(falling(1000, after=0.8))
    assert rates(run.sft, 1000) == pytest.approx(falling(1000, after=0.0))
    assert run.midtrain.lr_fraction == 1.0
    momenta = [muon_momentum(step, 1000, run.midtrain.schedule) for step in (0, 150, 300, 999)]
    assert momenta == pytest.approx([0.85, 0.90, 0.95, 0.95])


def test_januarys_sft_is_gentle() -> None:
    sft = open_profile("d20_seed").run.sft
    assert sft.lr_fraction == 0.02
    assert muon_momentum(0, 700, sft.schedule) == 0.95


def test_todays_single_sft_is_a_matter_of_settings() -> None:
    run = open_profile("d12", overrides=SINGLE_SFT).run
    assert run.midtrain.mixture == ()
    assert rates(run.sft, 1000) == pytest.approx(falling(1000, after=0.5))
    assert run.sft.lr_fraction == 0.8
    assert run.sft.total_batch_size == run.pretrain.total_batch_size
    momenta = [muon_momentum(step, 1000, run.sft.schedule) for step in (0, 150, 300, 999)]
    assert momenta == pytest.approx([0.85, 0.90, 0.95, 0.95])
    shares = {entry.task: entry.epochs for entry in run.sft.mixture}
    assert shares == {"smoltalk": 1, "identity": 2, "mmlu": 3, "gsm8k": 4}


def test_an_empty_mixture_passes_the_model_on_and_sft_begins_with_it(
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    job = make_job("midtrain", tmp_path / "midtrain", models, section={"mixture": []})
    assert run_stage(job) == {"steps": 0}
    files = [p.relative_to(job.output) for p in job.output.rglob("*") if p.is_file()]
    base = models["pretrain"]
    assert sorted(files) == sorted(p.relative_to(base) for p in base.rglob("*") if p.is_file())
    for name in files:
        assert (job.output / name).read_bytes() == (base / name).read_bytes(), name
    sft = make_job("sft", tmp_path / "sft", {**models, "midtrain": job.output})
    metrics = run_stage(sft)
    assert metrics["steps"] > 0
    steps = [int(load_state(place)["step"]) for place in (base, sft.output)]
    assert steps[1] == steps[0] + metrics["steps"]


def test_a_model_that_came_without_an_optimizer_is_trained_from_zero_moments(
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    bare = shutil.copytree(models["midtrain"], tmp_path / "bare")
    (bare / "optimizer.safetensors").unlink()
    job = make_job("sft", tmp_path / "sft", {**models, "midtrain": bare})
    metrics = run_stage(job)
    told = [e["text"] for e in read_events(job.events) if e["kind"] == "message"]
    assert not (job.output / "samples.jsonl").exists()  # an artifact holds what a stage reads
    assert "the model came without an optimizer's state: its moments begin at zero" in told
    assert int(load_state(job.output)["step"]) == metrics["steps"]
    assert metrics["val_loss"] < metrics["val_loss_first"]


def test_held_out_conversations_are_evaluated_on_the_way_and_change_nothing(
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    plain = make_job("sft", tmp_path / "plain", models)
    steps = run_stage(plain)["steps"]
    judged = make_job("sft", tmp_path / "judged", models, resources={"eval_every_steps": 2})
    run_stage(judged)
    evals = last_by_step(read_events(judged.events), "eval")
    assert list(evals) == sorted({*range(0, steps, 2), steps})
    assert len(evals) > 2
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (plain.output / name).read_bytes() == (judged.output / name).read_bytes()


def test_packing_is_reported_and_done_once_a_job(
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    def told() -> list[str]:
        events = read_events(job.events)
        return [e["text"] for e in events if e["kind"] == "message" and "packing" in e["text"]]

    job = make_job("sft", tmp_path, models)
    run_stage(job)
    assert told() == ["packing train: 80 conversations", "packing held_out: 8 conversations"]
    written = (job.directory / "scratch" / "train" / "tokens.npy").stat().st_ino
    run_stage(job)  # goes on from its last checkpoint
    assert len(told()) == 2
    assert (job.directory / "scratch" / "train" / "tokens.npy").stat().st_ino == written


def test_the_momentum_of_the_model_before_is_resumed(
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: with its momentum forgotten, the same stage ends elsewhere."""

    def state(where: str) -> dict[str, Any]:
        job = make_job("sft", tmp_path / where, models)
        run_stage(job)
        return load_state(job.output)

    warm = state("warm")
    load = open_loop.load_state

    def without_momentum(directory: Path) -> dict[str, Any]:
        kept = ("weight/", "step")
        return {k: v if k.startswith(kept) else 0 * v for k, v in load(directory).items()}

    monkeypatch.setattr(open_loop, "load_state", without_momentum)
    cold = state("cold")
    assert any(not warm[k].equal(cold[k]) for k in warm if k.startswith("weight/transformer.h."))
