"""The GPU as its driver's library, NVML, reports it: without torch or any of its memory."""

import ctypes
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
    """The machine's first GPU."""

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

    def joules(self) -> float:
        """Return the energy that it has used since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1000


def find_gpu() -> Gpu | None:
    """Return the machine's first GPU; None without one, or without NVIDIA's driver."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    return Gpu(library, handle)
