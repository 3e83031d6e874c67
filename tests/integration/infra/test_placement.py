"""What the environment says of this machine, and what is refused of it."""

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest

from flows.profiles import PROFILES, Pace, make_placement, tiny
from infra.placement import (
    SETTINGS,
    count_gpus,
    default_cache_limit,
    default_home,
    default_sinks,
    gpu_name,
    with_settings,
)
from nanochat_core.errors import ConfigError
from nanochat_core.job import Attention, Compile, Job, Resources
from tests.support.small_job import small_job


@pytest.mark.parametrize(("given", "limit"), [("", 100 * 10**9), ("2.5", 2_500_000_000), ("0", 0)])
def test_the_limit_of_the_cache_is_a_hundred_gigabytes_or_what_one_says(
    monkeypatch: pytest.MonkeyPatch, given: str, limit: int
):
    monkeypatch.setenv("NANOCHAT_CACHE_GB", given)
    assert default_cache_limit() == limit


@pytest.mark.parametrize("given", ["much", "-1", "nan", "inf"])
def test_a_limit_of_the_cache_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, given: str):
    monkeypatch.setenv("NANOCHAT_CACHE_GB", given)
    with pytest.raises(ConfigError, match=f"NANOCHAT_CACHE_GB is '{given}'"):
        default_cache_limit()


RESOURCES = Resources(
    device="cpu", threads=2, device_batch_size=8, save_every_seconds=60.0, eval_every_steps=10
)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("threads=1", 1), ("determinism=strict", "strict"), ("hang_seconds=90", 90.0)),
        *(("attention=sdpa", "sdpa"), ("sinks=wandb, trackio", ("wandb", "trackio"))),
        *((f"compile={str(value).lower()}", value) for value in typing.get_args(Compile)),
    ],
)
def test_a_setting_changes_what_a_job_sees(setting: str, value: object):
    name = setting.partition("=")[0]
    changed = with_settings(RESOURCES, [setting])
    assert changed == dataclasses.replace(RESOURCES, **{name: value})
    assert type(getattr(changed, name)) is type(value)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_can_be_given_and_a_number_has_a_least(name: str):
    value = getattr(RESOURCES, name)
    text = ",".join(value) if isinstance(value, tuple) else json.dumps(value).strip('"')
    assert with_settings(RESOURCES, [f"{name}={text}"]) == RESOURCES
    if type(value) in (int, float):
        with pytest.raises(ConfigError, match=rf"^{name} is -1(\.0)?$"):
            with_settings(RESOURCES, [f"{name}=-1"])


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        ("device_batch=4", "'device_batch=4' does not set", "did you mean 'device_batch_size=...'"),
        ("gpus=2", "'gpus=2' does not set", "one of: threads, device_batch_size"),  # has an option
        ("device=cuda", "'device=cuda' does not set", "one of: threads"),  # follows from the GPUs
        ("compile", "'compile' does not set", "did you mean 'compile=...'"),
        ("threads=0", "threads is 0", "at least 1"),
        ("device_batch_size=0", "device_batch_size is 0", "at least 1"),
        ("device_batch_size=x", "device_batch_size is 'x', expected int", "a whole number, like 8"),
        ("device_batch_size=2.5", "device_batch_size is 2.5, expected int", "a whole number"),
        ("hang_seconds=long", "hang_seconds is 'long', expected float", "a number, like 2.5"),
        ("hang_seconds=NaN", "hang_seconds is nan, expected a finite number", "a number"),
        ("compile=maybe", "compile is 'maybe'", "one of: auto, true, false, blocks"),
        ("autotune=maybe", "autotune is 'maybe', expected bool", "true or false"),
        ("determinism=mostly", "determinism is 'mostly'", "one of: default, strict"),
        ("attention=nope", "attention is 'nope'", "one of: auto, fa3, "),
        (
            "sinks=wandb,statsd",
            "sinks is 'wandb,statsd': there is no sink 'statsd'",
            "trackio or wandb, or both with a comma between them",
        ),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, message: str, hint: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        with_settings(RESOURCES, [setting])
    assert hint in str(caught.value.hint)


def test_two_values_of_one_setting_are_a_contradiction():
    with pytest.raises(ConfigError, match=r"^device_batch_size is set twice: to 4 and to 8$"):
        with_settings(RESOURCES, ["device_batch_size=4", "device_batch_size=8"])
    with pytest.raises(ConfigError, match=r"^sinks is set twice: to wandb and to none$"):
        with_settings(RESOURCES, ["sinks=wandb", "sinks="])
    assert with_settings(RESOURCES, ["compile=true", "compile=true"]).compile is True


def test_sinks_of_the_environment_stand_between_commas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NANOCHAT_SINKS", "wandb, trackio, wandb")
    assert default_sinks() == ("wandb", "trackio")
    monkeypatch.setenv("NANOCHAT_SINKS", "")
    assert default_sinks() == ()
    monkeypatch.setenv("NANOCHAT_SINKS", "wandb,statsd")
    expected = "NANOCHAT_SINKS is 'wandb,statsd': there is no sink 'statsd'"
    with pytest.raises(ConfigError, match=f"^{expected}$") as caught:
        default_sinks()
    assert "trackio or wandb" in str(caught.value.hint)


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("nvidia", "amd", "visible", "expected"),
    [
        (0, 0, {}, 0),
        (8, 0, {}, 8),
        (8, 0, {"CUDA_VISIBLE_DEVICES": "2,5"}, 2),  # a share of a node under Slurm
        (8, 0, {"CUDA_VISIBLE_DEVICES": "GPU-1b2c, GPU-3d4e"}, 2),
        (2, 0, {"CUDA_VISIBLE_DEVICES": "0,9,1"}, 1),  # there is no 9: the list ends
        (2, 0, {"CUDA_VISIBLE_DEVICES": "none"}, 0),
        (8, 0, {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (8, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        (8, 0, {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2),
        (8, 0, {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, 1),  # a process sees one MIG instance
        (0, 0, {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),  # a login node
        (8, 0, {"HIP_VISIBLE_DEVICES": "0"}, 8),
        (0, 4, {}, 4),
        (0, 4, {"HIP_VISIBLE_DEVICES": "1"}, 1),
        (0, 4, {"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "0,1"}, 2),
    ],
)
def test_gpus_are_those_that_this_process_may_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvidia: int,
    amd: int,
    visible: dict[str, str],
    expected: int,
):
    for name in _VISIBLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in visible.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+rocm7.0")
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{i}" for i in range(nvidia))):
        (tmp_path / "dev" / name).touch()
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for i, number in enumerate([0, 0, *(4000 + i for i in range(amd))]):  # two CPUs first
        (nodes / str(i)).mkdir(parents=True)
        (nodes / str(i) / "gpu_id").write_text(f"{number}\n")
    assert count_gpus(tmp_path) == expected
    if amd:  # an integrated one, beside a torch that cannot use it
        monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
        assert count_gpus(tmp_path) == 0


def test_a_gpu_of_another_container_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in _VISIBLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+rocm7.0")
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "1" / "gpu_id").mkdir(parents=True)  # reading it is an OSError, as for another's GPU
    (nodes / "2").mkdir()
    (nodes / "2" / "gpu_id").write_text("4001\n")
    assert count_gpus(tmp_path) == 1


def test_a_gpu_has_the_name_that_its_driver_gives(tmp_path: Path):
    assert gpu_name(tmp_path) is None
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t 45\n")
    assert gpu_name(tmp_path) == "NVIDIA H100 80GB HBM3"


def test_the_processes_of_a_machine_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("flows.profiles.count_threads", lambda: 16)
    pace = Pace(device_batch_size=1, save_every_seconds=60, eval_every_steps=0, max_gpus=32)
    for gpus, threads in ((0, 16), (1, 16), (8, 2), (32, 1)):
        resources = make_placement(pace, home=tmp_path, gpus=gpus).resources
        assert (resources.threads, resources.compile) == (threads, "auto" if gpus else False)
    small = make_placement(PROFILES["tiny"]().pace, home=tmp_path, gpus=1)
    assert not small.resources.compile  # it would take longer than the training
    # Nor does a second thread of a CPU pay for it, but for a wider model it does.
    threads = (make_placement(tiny(depth).pace, home=tmp_path, gpus=0) for depth in (3, 4))
    assert [each.resources.threads for each in threads] == [1, 16]


@pytest.mark.torch
def test_what_attention_may_be_is_the_table_of_backends():
    from nanochat_core.model.attention_backends import BACKENDS

    assert typing.get_args(Attention) == ("auto", *(backend.name for backend in BACKENDS))


def test_a_job_file_keeps_every_resource(tmp_path: Path):
    resources = with_settings(RESOURCES, ["sinks=trackio", "keep_checkpoints=3"])
    job = small_job(tmp_path, resources=resources)
    assert Job.read(job.write()).resources == resources


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NANOCHAT_HOME", "~/nc", "{home}/nc"),
        ("XDG_DATA_HOME", "", "{home}/.nanochat-flows"),
        ("XDG_DATA_HOME", "data", "{home}/.nanochat-flows"),  # relative: no directory of data
        ("XDG_DATA_HOME", "/data", "/data/nanochat-flows"),
    ],
)
def test_a_new_home_is_where_a_variable_says_and_an_existing_one_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NANOCHAT_HOME", "")
    monkeypatch.setenv(name, value)
    assert str(default_home()) == expected.format(home=tmp_path)
    if name == "XDG_DATA_HOME":
        (tmp_path / ".nanochat-flows").mkdir()
        assert default_home() == tmp_path / ".nanochat-flows"
