"""The stages of training on the plain model of January 2026, with its optimizer."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from nanochat_core.config import RunConfig
from nanochat_core.eras import numerics, of_era
from nanochat_core.job import Job
from nanochat_core.model.checkpoint import save_model
from nanochat_core.model.gpt import GPT

pytestmark = pytest.mark.torch

ERA = "2026-01-05"


def seed_sections(config: RunConfig) -> dict[str, Any]:
    """What makes the run of the tests one of January."""
    optimizer = dataclasses.replace(
        config.optimizer, muon="newton_schulz", muon_weight_decay=0.0, grad_clip=0.5
    )
    return {
        "numerics": numerics("fp32", era=ERA).tree(),
        "model": of_era(config.model, ERA, pattern="L").tree(),
        "optimizer": optimizer.tree(),
    }


def keys_of(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_every_stage_trains_the_model_of_january(
    config: RunConfig,
    data: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    outputs = dict(data)
    metrics: dict[str, dict[str, Any]] = {}
    for name in ("pretrain", "midtrain", "sft", "rl"):
        job = make_job(name, tmp_path / name, outputs)
        job.config.update({k: v for k, v in seed_sections(config).items() if k in job.config})
        metrics[name] = run_stage(job)
        outputs[name] = job.output
        names = keys_of(job.output / "model.safetensors")
        assert len(names) == 2 + 6 * config.model.depth, name
        state = keys_of(job.output / "optimizer.safetensors")
        assert not any(key.startswith("second_moment/") for key in state), name
        assert any(key.startswith("momentum/") for key in state), name
    assert metrics["pretrain"]["val_bpb"] < metrics["pretrain"]["val_bpb_first"]
    assert metrics["sft"]["val_loss"] < metrics["midtrain"]["val_loss_first"]


def test_a_stage_trains_a_model_of_ones_own_whose_settings_are_those_of_an_era_between(
    config: RunConfig,
    data: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
) -> None:
    era = "2026-01-17"
    model = GPT(of_era(config.model, era, pattern="SL"), numerics("fp32", era=era))
    model.init_weights(1)
    (tmp_path / "mine").mkdir()
    save_model(
        tmp_path / "mine", model, tokenizer=data["tokenizer"], optimizer=None, made_by="pretrain"
    )
    job = make_job("midtrain", tmp_path / "job", {**data, "pretrain": tmp_path / "mine"})
    assert run_stage(job)["val_loss"] > 0
    assert (job.output / "model.safetensors").exists()
