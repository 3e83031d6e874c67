"""Profiles: what each is known for, and what a person may change of it."""

import functools

import pytest

from flows.profiles import open_profile
from nanochat_core.errors import ConfigError
from nanochat_core.roofline import named_gpu, pretraining, training_bytes


def test_the_seed_has_its_own_dial():
    assert open_profile("d20_seed", depth=11).run.model.num_heads == 8
    assert open_profile("d12", depth=11).run.model.num_heads == 6


def test_a_wrong_setting_of_an_era_is_refused(transcript):
    for override in (
        *("numerics.precision=fp16", "numerics.precision=int8", "optimizer.muon=adam"),
        *("optimizer.grad_clip=-1.0", "optimizer.muon_weight_decay=0.1", "model.smear=1"),
    ):
        open_it = functools.partial(open_profile, "d20_seed", overrides=(override,))
        transcript.refused(override, ConfigError, open_it)


def test_single_parts_can_be_taken_away_and_put_back():
    run = open_profile("d12", overrides=["model.smear=false", "optimizer.grad_clip=1.0"]).run
    assert (run.model.smear, run.optimizer.grad_clip) == (False, 1.0)
    run = open_profile("d20_seed", overrides=["optimizer.grad_clip=null"]).run
    assert run.optimizer.grad_clip is None
    assert open_profile("d12", overrides=["numerics.precision=fp8"]).run.numerics.precision == "fp8"


@pytest.mark.parametrize(
    ("name", "card", "hours"),
    [("evening8", "4060", 4), ("evening24", "4090", 4), ("hour", "h100", 0.6)],
)
def test_a_profile_for_one_card_fits_it_and_its_time(name: str, card: str, hours: float) -> None:
    profile, gpu = open_profile(name, snapshots=False), named_gpu(card)
    needed = training_bytes(profile.run, 1, rows=profile.pace.device_batch_size)
    assert needed < 0.9 * gpu.memory  # without a second try after running out of it
    pace = pretraining(profile.run, gpu, "bf16")
    assert pace is not None
    assert 0.4 * hours < pace.gpu_seconds / 3600 < hours
    assert profile.pace.max_gpus == 1
    asked = {task.name for task in profile.run.chat_eval.tasks}
    assert "humaneval" not in asked
    assert {"gsm8k", "mmlu"} < asked
