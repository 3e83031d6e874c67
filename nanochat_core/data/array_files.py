"""Write arrays to files so that every disk error raises OSError with its errno; read an index.

`ndarray.tofile`, and `numpy.save` which calls it, write through a C stream and ignore errors when
it is closed: on a full disk the last kilobytes can be missing, and their errors have no errno.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from nanochat_core.errors import DataError


def write_array(file: IO[bytes], array: npt.NDArray[Any]) -> None:
    """Append the array's values in C order. Raises OSError, here or when the file is closed."""
    file.write(np.ascontiguousarray(array).data)


@contextlib.contextmanager
def new_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """Open a .npy file; the block writes its values in C order. Complete and durable at the end.

    Raises AssertionError if the block wrote another number of bytes than the shape has.
    """
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, header)
        start, expected = file.tell(), dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        yield file
        size = file.tell() - start
        assert size == expected, f"{size:,} bytes of {expected:,} were written to {path}"
        # A later rename must not become durable before the values.
        file.flush()
        os.fsync(file.fileno())


def read_index(path: Path, number: int, *, what: str) -> dict[str, Any]:
    """Read the JSON object that describes a directory of `what`.

    Raises DataError if there is none, or if its "format" is not `number`.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path.parent} holds no {what}: {error}") from error
    if not isinstance(tree, dict) or tree.get("format") != number:
        raise DataError(
            f"{path} is not of format {number}",
            hint="it was written by another version of nanochat-flows",
        )
    return tree
