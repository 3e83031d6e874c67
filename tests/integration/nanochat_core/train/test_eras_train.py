"""The stages of training on the plain model of January 2026, with its optimizer."""

import dataclasses

import pytest
from safetensors import safe_open

from nanochat_core.eras import numerics, of_era

pytestmark = pytest.mark.torch

ERA = "2026-01-05"


def seed_sections(config):
    """What makes the run of the tests one of January."""
    optimizer = dataclasses.replace(
        config.optimizer, muon="newton_schulz", muon_weight_decay=0.0, grad_clip=0.5
    )
    return {
        "numerics": numerics("fp32", era=ERA).tree(),
        "model": of_era(config.model, ERA, pattern="L").tree(),
        "optimizer": optimizer.tree(),
    }


def keys_of(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_every_stage_trains_the_model_of_january(bench):
    outputs, metrics = {}, {}
    for name in ("pretrain", "midtrain", "sft", "rl"):
        job = bench.job(name, name, inputs=outputs)
        job.config.update({k: v for k, v in seed_sections(bench.config).items() if k in job.config})
        metrics[name] = bench.run(job)
        outputs[name] = job.output
        names = keys_of(job.output / "model.safetensors")
        assert len(names) == 2 + 6 * bench.config.model.depth, name
        state = keys_of(job.output / "optimizer.safetensors")
        assert not any(key.startswith("second_moment/") for key in state), name
        assert any(key.startswith("momentum/") for key in state), name
    assert metrics["pretrain"]["val_bpb"] < metrics["pretrain"]["val_bpb_first"]
    assert metrics["sft"]["val_loss"] < metrics["midtrain"]["val_loss_first"]
