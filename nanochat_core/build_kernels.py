"""Build this machine's compiled kernels before a stage needs them. Imports no torch."""

from contextlib import suppress

from nanochat_core.engine.native.build import load_kernels
from nanochat_core.model.native.build import LIBRARY
from nanochat_core.runtime.hardware.cpp_library import Unavailable

FP32 = 0  # place among engine/native/weights.py's FORMS


def build_kernels() -> None:
    """Build the kernels of fp32 training and of the engine, unless they are cached: some 10 CPU
    seconds. Without a compiler there are none, and nothing is done."""
    with suppress(Unavailable):
        LIBRARY.load()
        load_kernels(FP32)
