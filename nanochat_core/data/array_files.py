"""Arrays written into files so that what the disk refuses is an error, with its number (errno).

`ndarray.tofile`, and `numpy.save` which calls it, write through a stream of their own: they ignore
what closing it says, so that the last kilobytes can be missing, and their errors have no number.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt


def write_array(file: IO[bytes], array: npt.NDArray[Any]) -> None:
    """Append the array's values in C order. Raises OSError here or when the file is closed."""
    file.write(np.ascontiguousarray(array).data)


def check_size(path: Path, size: int) -> None:
    """Raise OSError unless the file has so many bytes: before it is taken for done."""
    found = path.stat().st_size
    if found != size:
        raise OSError(
            errno.EIO, f"{size} bytes were written, the disk has {found} of them", str(path)
        )


@contextlib.contextmanager
def new_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """A .npy file of which the values are still to be written, in order; whole at the end."""
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, header)
        size = file.tell() + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        yield file
        file.flush()
        os.fsync(file.fileno())
    check_size(path, size)
