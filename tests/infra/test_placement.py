"""What the environment says of this machine, and what is refused of it."""

import dataclasses
import re
from pathlib import Path

import pytest

from infra.placement import Placement, default_cache_limit, with_settings
from nanochat_core.errors import ConfigError
from nanochat_core.job import Job


@pytest.mark.parametrize(
    ("given", "limit"),
    [(None, 100 * 10**9), ("", 100 * 10**9), ("2.5", 2_500_000_000), ("0", 0)],
)
def test_the_limit_of_the_cache_is_a_hundred_gigabytes_or_what_one_says(
    monkeypatch: pytest.MonkeyPatch, given: str | None, limit: int
):
    if given is None:
        monkeypatch.delenv("NANOCHAT_CACHE_GB", raising=False)
    else:
        monkeypatch.setenv("NANOCHAT_CACHE_GB", given)
    assert default_cache_limit() == limit


@pytest.mark.parametrize("given", ["much", "-1", "nan", "inf"])
def test_what_is_no_limit_is_refused(monkeypatch: pytest.MonkeyPatch, given: str):
    monkeypatch.setenv("NANOCHAT_CACHE_GB", given)
    with pytest.raises(ConfigError, match=f"NANOCHAT_CACHE_GB is '{given}'"):
        default_cache_limit()


PLACEMENT = Placement(
    home=Path("/home"),
    store="file:///store",
    gpus=0,
    threads=2,
    device_batch_size=8,
    save_every_seconds=60.0,
    eval_every_steps=10,
    dollars_per_hour=0.0,
)


def test_settings_change_what_a_job_sees_and_nothing_else():
    changed = with_settings(
        PLACEMENT,
        [
            "device_batch_size=4",
            "compile=true",
            "attention=sdpa",
            "determinism=strict",
            'sinks=["wandb"]',
            "hang_seconds=90",
        ],
    )
    expected = dataclasses.replace(
        PLACEMENT,
        device_batch_size=4,
        compile=True,
        attention="sdpa",
        determinism="strict",
        sinks=("wandb",),
        hang_seconds=90.0,
    )
    assert changed == expected
    seen = vars(changed.resources)
    assert seen["device"] == "cpu"
    assert {name: getattr(changed, name) for name in seen if name != "device"} == {
        name: value for name, value in seen.items() if name != "device"
    }


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("device_batch=4", "'device_batch=4' does not set", "did you mean 'device_batch_size=...'"),
        ("gpus=2", "'gpus=2' does not set", None),  # it has an option of its own
        ("compile", "'compile' does not set", None),
        ("device_batch_size=0", "device_batch_size is 0", "at least 1"),
        ("device_batch_size=many", "device_batch_size is 'many', expected int", None),
        ("determinism=mostly", "determinism is 'mostly'", "one of: default, strict"),
        ('sinks=["statsd"]', "there is no sink 'statsd'", "one of: trackio, wandb"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, message: str, hint: str | None):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        with_settings(PLACEMENT, [setting])
    assert hint is None or hint in str(caught.value.hint)


def test_a_job_file_keeps_every_resource(tmp_path: Path):
    resources = with_settings(PLACEMENT, ['sinks=["trackio"]', "keep_checkpoints=3"]).resources
    job = Job(
        directory=tmp_path,
        stage="pretrain",
        entry="toy",
        fingerprint="f" * 64,
        config={},
        inputs={},
        resources=resources,
    )
    assert Job.read(job.write()).resources == resources
