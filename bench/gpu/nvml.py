"""The GPU as its driver's library, NVML, reports it: without torch or any of its memory."""

import ctypes
import os
import statistics
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
TEXT = 96  # bytes for a name or a version
SM_CLOCK, MEMORY_CLOCK = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
# nvmlClocksEventReason's bits.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, software",
    0x40: "thermal, hardware",
    0x80: "power brake",
    0x100: "display clocks",
}
BETWEEN = 0.1  # seconds from one sample of the clocks to the next
Sample = tuple[int | None, int | None, int | None, int | None, int | None]


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class Gpu:
    """The first GPU that CUDA shows to a process."""

    _library: Any
    _handle: ctypes.c_void_p

    @property
    def name(self) -> str:
        """Its product name."""
        text = ctypes.create_string_buffer(TEXT)
        self._library.nvmlDeviceGetName(self._handle, text, TEXT)
        return text.value.decode()

    @property
    def driver(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(TEXT)
        self._library.nvmlSystemGetDriverVersion(text, TEXT)
        return text.value.decode()

    @property
    def total_bytes(self) -> int:
        """Its memory."""
        memory = _Memory()
        self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory))
        return memory.total

    def joules(self) -> float | None:
        """Return the energy it has used since the driver was loaded; None if it does not count."""
        millijoules = ctypes.c_ulonglong()
        count = self._library.nvmlDeviceGetTotalEnergyConsumption
        return None if count(self._handle, ctypes.byref(millijoules)) else millijoules.value / 1000

    def sample(self) -> Sample:
        """Return the clocks of processors and memory in MHz, milliwatts, degrees Celsius and the
        bits of REASONS; None for what it does not report."""
        return (
            self._number("nvmlDeviceGetClockInfo", SM_CLOCK),
            self._number("nvmlDeviceGetClockInfo", MEMORY_CLOCK),
            self._number("nvmlDeviceGetPowerUsage"),
            self._number("nvmlDeviceGetTemperature", 0),
            # The name that every driver has: newer ones call it ClocksEventReasons.
            self._number("nvmlDeviceGetCurrentClocksThrottleReasons"),
        )

    def _number(self, function: str, *which: int) -> int | None:
        value = ctypes.c_ulonglong()  # the low bytes of it, where a function writes 32 bits
        code = getattr(self._library, function)(self._handle, *which, ctypes.byref(value))
        return None if code else value.value


class Sampler:
    """Samples the clocks of a GPU until it is closed."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._samples = [gpu.sample()]
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> dict[str, Any]:
        """Return medians, extremes, and the share of samples in which the clocks had a reason not
        to be the highest."""
        self._is_closed.set()
        self._thread.join()
        clocks, memory, power, heat, reasons = (
            [value for value in column if value is not None]
            for column in zip(*self._samples, strict=True)
        )
        bits = Counter(name for r in reasons for bit, name in REASONS.items() if r & bit)
        return {
            "samples": len(self._samples),
            "sm_mhz": statistics.median(clocks) if clocks else None,
            "sm_mhz_least": min(clocks, default=None),
            "memory_mhz": statistics.median(memory) if memory else None,
            "watts": round(statistics.median(power) / 1000) if power else None,
            "celsius_most": max(heat, default=None),
            "reasons": {name: round(n / len(reasons), 3) for name, n in bits.items()},
        }

    def _run(self) -> None:
        while not self._is_closed.wait(BETWEEN):
            self._samples.append(self._gpu.sample())


def find_gpu() -> Gpu | None:
    """Return the first GPU that CUDA shows; None without one, or without NVIDIA's driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    if library.nvmlInit_v2():
        return None
    # NVML has all GPUs of the machine, also those that the variable hides.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    handle = ctypes.c_void_p()
    if first.isdecimal():
        is_missing = library.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
    else:
        is_missing = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    return None if is_missing else Gpu(library, handle)
