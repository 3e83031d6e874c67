"""The device of a job, and what "strict" sets before a GPU is touched."""

import os
from collections.abc import Iterator

import pytest
import torch

from nanochat_core.errors import ConfigError
from nanochat_core.job import Determinism, Resources
from nanochat_core.runtime.device import open_device

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _settings_are_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def resources(determinism: Determinism) -> Resources:
    return Resources(
        device="cuda",
        threads=1,
        device_batch_size=1,
        save_every_seconds=60.0,
        eval_every_steps=0,
        dollars_per_hour=0.0,
        determinism=determinism,
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What cuBLAS was told when the first GPU was touched."""
    found: list[str | None] = []

    def set_device(index: int) -> None:
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    # Set, then deleted: so that it is taken away again whatever sets it meanwhile.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    return found


def test_a_strict_job_run_by_hand_tells_cublas_before_a_gpu_is_touched(
    seen: list[str | None],
) -> None:
    open_device(resources("strict"))
    assert seen == [":4096:8"]
    assert torch.are_deterministic_algorithms_enabled()


def test_a_persons_own_setting_stays(
    seen: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    open_device(resources("strict"))
    assert seen == [":16:8"]


def test_a_job_that_is_not_strict_sets_nothing(seen: list[str | None]) -> None:
    open_device(resources("default"))
    assert seen == [None]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_that_is_not_there_is_a_persons_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="asks for a GPU"):
        open_device(resources("default"))
