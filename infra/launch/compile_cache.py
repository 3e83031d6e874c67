"""Choose and repair the folder in which torch.compile caches its kernels.

torch has the linker write a kernel under its final name, and loads whatever has that name later. A
process that is killed meanwhile leaves a short file there: unless it is removed, each later run on
the machine fails with "file too short".
"""

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from nanochat_core.runtime.hardware.cpp_library import processor_flags
from nanochat_core.runtime.user_cache import user_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # also of a folder that the user chose
_HEADER = 64  # bytes of an ELF header; at 40 the offset of its table of sections, at 58 its size


def compile_cache(log: Callable[[str], None], *, fallback: Path) -> dict[str, str]:
    """Return the environment of a process that compiles, after removing unfinished kernels.

    The folder is the user's choice, else ours for this version of torch and this processor. If that
    cannot be written it is `fallback`: the name of torch's own default in /tmp may be another
    user's, who could put code there.
    """
    chosen = os.environ.get(VARIABLE)
    with contextlib.suppress(OSError, RuntimeError):  # no home directory, or a read-only one
        folder = Path(chosen) if chosen else user_cache() / "torch-compile" / _version()
        folder.mkdir(parents=True, exist_ok=True)
        if count := remove_unfinished(folder):
            kernels = "1 unfinished kernel" if count == 1 else f"{count} unfinished kernels"
            log(f"{kernels} of torch.compile removed from {folder}: a process was killed there")
        return {VARIABLE: str(folder)}
    return {VARIABLE: str(fallback)}


def remove_unfinished(folder: Path) -> int:
    """Remove every kernel in torch's folder that is not whole; return how many were removed."""
    if sys.platform != "linux":  # its libraries are no ELF files
        return 0
    removed = 0
    for path in folder.glob("**/*.so"):
        # torch links a kernel under this lock. One that another process is making is left alone.
        lock = FileLock(folder / "locks" / f"{path.name.partition('.')[0]}.lock", timeout=0)
        with contextlib.suppress(FileNotFoundError, Timeout):
            if not _is_whole(path):
                with lock:
                    if not _is_whole(path):
                        path.unlink()
                        removed += 1
    return removed


def _is_whole(path: Path) -> bool:
    """Return whether an ELF file ends where its header says. Linkers write the header last."""
    with path.open("rb") as file:
        header = file.read(_HEADER)
        size = os.fstat(file.fileno()).st_size
    if len(header) < _HEADER or header[:4] != b"\x7fELF":
        return False
    (sections,) = struct.unpack_from("<Q", header, 40)
    length, count = struct.unpack_from("<HH", header, 58)
    return sections + length * count <= size


def _version() -> str:
    # Imported here: it is slow to import, and needed by few jobs.
    from importlib.metadata import version

    # The processor: kernels are built for this one, and machines may share a home.
    processor = hashlib.sha256(repr(sorted(processor_flags())).encode()).hexdigest()[:8]
    return f"{version('torch')}-{processor}"
