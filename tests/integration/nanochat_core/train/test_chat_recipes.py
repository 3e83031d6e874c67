"""Both of nanochat's ways to a chat model: midtraining and SFT, as in January 2026, or one SFT."""

import dataclasses
import shutil

import pytest
from safetensors import safe_open

from flows.profiles import open_profile
from nanochat_core.eras import numerics, of_era
from nanochat_core.model.checkpoint import load_state
from nanochat_core.optim.schedule import lr_multiplier

pytestmark = pytest.mark.torch
# What turns a profile's chat stages into today's nanochat's; its batch is the base model's.
SINGLE_SFT = (
    "midtrain.mixture=[]",
    "sft.mixture=sft-without-midtraining",
    "sft.schedule.warmdown_fraction=0.5",
    "sft.total_batch_size=524288",
)


def test_todays_single_sft_is_a_matter_of_settings():
    run = open_profile("d12", overrides=SINGLE_SFT).run
    assert run.midtrain.mixture == ()
    rates = [lr_multiplier(step, 1000, run.sft.schedule) for step in (0, 500, 750, 999)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 0.002])
    assert run.sft.lr_fraction == 0.8
    assert run.sft.total_batch_size == run.pretrain.total_batch_size
    shares = {entry.task: entry.epochs for entry in run.sft.mixture}
    assert shares == {"smoltalk": 1, "identity": 2, "mmlu": 3, "gsm8k": 4}


def test_an_empty_mixture_passes_the_model_on_and_sft_begins_with_it(bench):
    job, metrics = bench.done("midtrain", "midtrain", section={"mixture": []})
    base = bench.models["pretrain"]
    assert metrics == {"steps": 0}
    assert bench.files(job.output) == bench.files(base)
    sft, metrics = bench.done("sft", "sft", inputs={"midtrain": job.output})
    assert metrics["steps"] > 0
    steps = [int(load_state(directory)["step"]) for directory in (base, sft.output)]
    assert steps[1] == steps[0] + metrics["steps"]


def test_a_model_that_came_without_an_optimizer_is_trained_from_zero_moments(bench, tmp_path):
    bare = shutil.copytree(bench.models["midtrain"], tmp_path / "bare")
    (bare / "optimizer.safetensors").unlink()
    job, metrics = bench.done("sft", inputs={"midtrain": bare})
    assert not (job.output / "samples.jsonl").exists()  # an artifact holds what a stage reads
    text = "the model came without an optimizer's state: its moments begin at zero"
    assert text in bench.messages(job)
    assert int(load_state(job.output)["step"]) == metrics["steps"]
    assert metrics["val_loss"] < metrics["val_loss_first"]


def test_packing_is_reported_and_done_once_a_job(bench):
    def packing():
        return [text for text in bench.messages(job) if "packing" in text]

    job, _ = bench.done("sft")
    assert packing() == ["packing train: 80 conversations", "packing held_out: 8 conversations"]
    tokens = job.directory / "scratch" / "train" / "tokens.npy"
    written = tokens.stat().st_ino
    bench.run(job)  # resumes from its last checkpoint
    assert len(packing()) == 2
    assert tokens.stat().st_ino == written


# The plain model of January 2026, with its optimizer.

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
