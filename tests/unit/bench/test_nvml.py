"""The GPU whose memory, energy and clocks a bench reports is the one on which it measures."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from bench.gpu.nvml import Sampler, find_gpu


class Library:
    """NVML of a machine with eight GPUs that count no energy and have no thermometer."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        self.asked.append(index)
        return int(index >= 8)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        self.asked.append(uuid.decode())
        return int(not uuid)

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            number = NUMBERS.get((name, *(word for word in given if type(word) is int)))
            if number is None:
                return 0 if name == "nvmlInit_v2" else 3  # NVML_ERROR_NOT_SUPPORTED
            given[-1]._obj.value = number
            return 0

        return call


NUMBERS = {
    ("nvmlDeviceGetClockInfo", 1): 1755,
    ("nvmlDeviceGetClockInfo", 2): 2619,
    ("nvmlDeviceGetPowerUsage",): 693_400,
    ("nvmlDeviceGetCurrentClocksThrottleReasons",): 0x4 | 0x20,
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


# What CUDA shows, which GPU is asked for, and whether it is there.
SHOWN = [
    *((None, 0, True), ("3", 3, True), ("5,4", 5, True), ("", "", False), ("8", 8, False)),
    ("GPU-1a2b,GPU-3c4d", "GPU-1a2b", True),
]


@pytest.mark.parametrize(("shown", "asked", "is_there"), SHOWN)
def test_the_gpu_is_the_first_that_cuda_shows(
    shown: str | None,
    asked: int | str,
    is_there: bool,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert (find_gpu() is not None) == is_there
    assert library.asked == [asked]


@pytest.mark.usefixtures("library")
def test_the_clocks_are_sampled_with_the_reasons_that_they_are_not_higher() -> None:
    gpu = find_gpu()
    assert gpu is not None
    assert gpu.joules() is None  # which it does not count
    found = Sampler(gpu).close()
    assert found.pop("samples") >= 1
    assert found == {
        "sm_mhz": 1755,
        "sm_mhz_least": 1755,
        "memory_mhz": 2619,
        "watts": 693,
        "celsius_most": None,
        "reasons": {"power cap": 1.0, "thermal, software": 1.0},
    }
