"""The GPU as its driver's library, NVML, reports it: without torch or any of its memory."""

import ctypes
import os
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
TEXT = 96  # bytes for a name or a version


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
