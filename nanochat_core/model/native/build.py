"""The library of training's compiled kernels, from the .cpp and .h files here. Imports no torch."""

import ctypes
from pathlib import Path

from nanochat_core.runtime.hardware.cpp_library import Library

_INT, _INT64, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_ROWS = (_INT, _INT64, _INT64)  # threads, rows, width
LIBRARY = Library(
    folder=Path(__file__).parent,
    files=("kernels.cpp", "loss.h", "products.h", "rows.h"),
    needed_flags=frozenset(["avx2", "fma"]),
    functions=(
        ("nf_work", _INT64, ()),
        (
            "nf_multiply",
            None,
            (_INT, *(_INT64,) * 3, *(_POINTER, _INT64, _INT64) * 2, _POINTER, _POINTER),
        ),
        ("nf_loss_work", _INT64, (_INT, _INT64, _INT64, _INT)),
        (
            "nf_loss",
            None,
            (_INT, *(_INT64,) * 3, *(_POINTER,) * 4, _FLOAT, *(_POINTER,) * 4),
        ),
        ("nf_slopes", None, (_INT, _INT64, _INT64, _POINTER, _FLOAT, _POINTER)),
        # Of rows.py.
        ("nf_normalise", None, (*_ROWS, _POINTER, _FLOAT, _POINTER, _POINTER)),
        ("nf_normalise_grad", None, (*_ROWS, *(_POINTER,) * 4)),
        (
            "nf_rotate_normalise",
            None,
            (_INT, *(_INT64,) * 4, *(_POINTER,) * 3, _FLOAT, _FLOAT, _POINTER, _POINTER),
        ),
        (
            "nf_rotate_normalise_grad",
            None,
            (
                *(_INT, *(_INT64,) * 4, *(_POINTER,) * 3, _FLOAT),
                *(*(_POINTER,) * 2, *(_INT64,) * 3, _POINTER),
            ),
        ),
        ("nf_relu_square", None, (*_ROWS, *(_POINTER,) * 2)),
        ("nf_relu_square_grad", None, (*_ROWS, *(_POINTER,) * 3)),
        ("nf_mix", None, (*_ROWS, *(_POINTER,) * 2, _FLOAT, _FLOAT, _POINTER)),
        ("nf_mix_grad", None, (*_ROWS, *(_POINTER,) * 2, _FLOAT, _FLOAT, *(_POINTER,) * 5)),
    ),
)
