"""The libraries of the engine's compiled kernels, from the .cpp and .h files here."""

import ctypes
import dataclasses
import os
from pathlib import Path
from typing import Literal, TypeAlias

from nanochat_core.runtime.hardware import cpp_library

Tiles: TypeAlias = Literal["none", "amx", "emulated"]

AMX = frozenset(["amx_tile", "amx_bf16", "amx_int8"])  # flags of a processor that has the tiles
TILE_FLAGS: dict[Tiles, tuple[str, ...]] = {
    "none": (),
    "amx": ("-DNF_TILES", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "emulated": ("-DNF_TILES", "-DNF_EMULATED"),
}
_INT32, _INT64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
LIBRARY = cpp_library.Library(
    folder=Path(__file__).parent,
    files=(  # each by its name, because a fingerprint sees the data files that a module names
        "kernels.cpp",
        "kernels_attention.h",
        "kernels_lanes.h",
        "kernels_sample.h",
        "kernels_matrix.h",
        "kernels_model.h",
        "kernels_simd.h",
        "kernels_spec.h",
        "kernels_threads.h",
        "kernels_tiles.h",
    ),
    needed_flags=frozenset(["avx2", "fma"]),  # and AVX-512 where there is all that it needs
    functions=(
        ("nf_request_tiles", ctypes.c_int, ()),
        ("nf_open", _POINTER, (_POINTER, _POINTER)),
        ("nf_close", None, (_POINTER,)),
        ("nf_read", None, (_POINTER, _INT32, *(_POINTER,) * 4, _INT32, _POINTER, _POINTER)),
        ("nf_step", None, (_POINTER, _INT32, _POINTER, _POINTER)),
        ("nf_sample", None, (_POINTER, _INT32, *(_POINTER,) * 3, _INT64, _POINTER)),
        ("nf_decode", None, (_POINTER, _INT32, _POINTER, _POINTER, _INT32, _POINTER)),
    ),
    # Without contraction a sum has one rounding per operation wherever it is inlined.
    flags=(*cpp_library.FLAGS, "-ffp-contract=off"),
)


def unable_here() -> str | None:
    """Return why kernels cannot be built or run on this machine; None means that they can."""
    return LIBRARY.unable_here()


def load_kernels(form: int, *, tiles: Tiles = "none") -> ctypes.CDLL:
    """Load or build the kernels of a form of numbers, by its place in weights.py's FORMS.

    tiles: what multiplies; "emulated" computes as AMX on any processor, and slowly. See
    `Library.load`. Raises cpp_library.Unavailable.
    """
    library = dataclasses.replace(
        LIBRARY,
        flags=(*LIBRARY.flags, f"-DNF_FORM={form}", *TILE_FLAGS[tiles]),
        needed_flags=LIBRARY.needed_flags | (AMX if tiles == "amx" else frozenset()),
    ).load()
    if tiles != "none" and (error := library.nf_request_tiles()):
        raise cpp_library.Unavailable(f"Linux does not permit AMX: {os.strerror(error)}")
    return library
