"""Builds and loads libraries of compiled kernels, each once per machine, from .cpp and .h files.

A build is cached in a folder under a name made of all that it depends on: sources, flags, the
compiler's version, the processor. It ends with a digest of itself, which is checked before it is
loaded: a truncated library kills the process that maps it. A file that is not whole, not a library,
or owned by another user is built again. If a library cannot be built, callers get a reason and
compute in another way.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from nanochat_core.runtime.user_cache import user_cache
from nanochat_core.runtime.versions import note_version

COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
TIMEOUT = 300  # seconds
DIGEST_BYTES = hashlib.sha256().digest_size

Sources: TypeAlias = tuple[tuple[str, bytes], ...]  # name and content of each file


class Unavailable(Exception):
    """A library cannot be built or loaded here; the message is a reason to show to users."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """C++ sources, and what they need and export."""

    folder: Path
    files: tuple[str, ...]  # the first is compiled, it includes the others
    needed_flags: frozenset[str]  # of the processor
    functions: tuple[tuple[str, Any, tuple[Any, ...]], ...]  # name, result, arguments
    flags: tuple[str, ...] = FLAGS

    def unable_here(self) -> str | None:
        """Return why it cannot be built or run on this machine; None means that it can."""
        missing = self.needed_flags - processor_flags()
        if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
            return f"the kernels are for Linux on x86-64, this is {platform.system()} on " + (
                platform.machine() or "an unknown machine"
            )
        if missing:
            return f"the processor lacks {', '.join(sorted(missing))}"
        if find_compiler() is None:
            return f"there is no C++ compiler ({', '.join(COMPILERS)})"
        return None

    def load(self, cache: Path | None = None) -> ctypes.CDLL:
        """Load the library from the cache folder (the user's by default), or build it into that.

        Raises Unavailable.
        """
        if (reason := self.unable_here()) is not None:
            raise Unavailable(reason)
        compiler = find_compiler()
        assert compiler is not None
        try:
            folder = (cache or user_cache()) / "kernels"
        except RuntimeError as error:  # the user's home directory is unknown
            raise Unavailable(f"there is no cache folder for the kernels: {error}") from error
        try:
            note_version("compiler", _version(compiler).partition("\n")[0])
            sources = self.read_sources()
            path = folder / f"{self.fingerprint(compiler, sources)}.so"
            if (library := self._find(path)) is not None:
                return library
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                for left in folder.glob("build-*"):  # by a process that was killed
                    # Where locks do not work, others build now: theirs are young, or gone by now.
                    with suppress(FileNotFoundError):
                        if left.stat().st_mtime < time.time() - TIMEOUT:
                            shutil.rmtree(left, ignore_errors=True)
                return self._find(path) or self.build(compiler, path, sources)
        except (OSError, RuntimeError) as error:
            raise Unavailable(f"the kernels cannot be stored in {folder}: {error}") from error

    def read_sources(self) -> Sources:
        """Read the sources, once: the compiler gets the bytes that the library is named after."""
        return _read(self.folder, self.files)

    def fingerprint(self, compiler: str, sources: Sources) -> str:
        """Return 16 hex digits of all that the library depends on."""
        # The processor too: -march=native builds for this one, and machines may share a home.
        basis = (_version(compiler), self.flags, sorted(processor_flags()))
        digest = hashlib.sha256(repr(basis).encode())
        for name, data in sources:
            digest.update(name.encode() + b"\0" + data + b"\0")
        return digest.hexdigest()[:16]

    def _find(self, path: Path) -> ctypes.CDLL | None:
        """Return the library at `path`, or None if there is none that can be used."""
        if _is_ours_and_whole(path):
            with suppress(OSError):  # not loadable in spite of its digest: to be built again
                return self._open(path)
        return None

    def _open(self, path: Path) -> ctypes.CDLL:
        """Load the library at `path`. Raises OSError if it is not one, or lacks a function."""
        library = ctypes.CDLL(str(path))
        for name, result, arguments in self.functions:
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise OSError(str(error)) from error
            function.restype, function.argtypes = result, arguments
        return library

    def build(self, compiler: str, path: Path, sources: Sources) -> ctypes.CDLL:
        """Compile the sources, store the library at `path` and load it. Raises Unavailable."""
        # Built in a folder of its own and renamed at the end: of a killed process nothing has the
        # name.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as scratch:
            for name, data in sources:
                (Path(scratch) / name).write_bytes(data)
            built = Path(scratch) / "kernels.so"
            command = [compiler, *self.flags, str(Path(scratch) / self.files[0]), "-o", str(built)]
            try:
                run = subprocess.run(
                    command, capture_output=True, text=True, timeout=TIMEOUT, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise Unavailable(f"{compiler} took more than {TIMEOUT} s") from error
            if run.returncode or not built.exists():
                lines = [line for line in run.stderr.splitlines() if "error" in line]
                why = lines[0] if lines else f"exit status {run.returncode}"
                raise Unavailable(f"{compiler} does not build the kernels: {why}")
            digest = hashlib.sha256(built.read_bytes()).digest()
            # Loaders ignore what follows the last section. fsync before the rename: after a power
            # loss the name must not lead to a file whose data was never written.
            with built.open("ab") as file:
                file.write(digest)
                file.flush()
                os.fsync(file.fileno())
            # Loaded before the rename: what cannot be loaded never gets the name.
            library = self._open(built)
            built.replace(path)
            return library


@lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """Return the processor's features by Linux' names; empty if this is not Linux on x86."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    return frozenset(lines[0].partition(":")[2].split()) if lines else frozenset()


def find_compiler() -> str | None:
    """Return the path of the first of COMPILERS that is installed, or None."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process build at a time: the ranks of a job start together."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system may have no locks: then each builds its own
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_ours_and_whole(path: Path) -> bool:
    """Return whether the file was written by this user or root, and matches its digest.

    False if there is none. Raises OSError if it cannot be read.
    """
    # The owner, because a library's code runs on loading: in a shared cache folder another user
    # could have put it there. Of the open file, so that the two checks are of the same one.
    try:
        with path.open("rb") as file:
            owner, data = os.fstat(file.fileno()).st_uid, file.read()
    except FileNotFoundError:
        return False
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return owner in (0, os.geteuid()) and hashlib.sha256(body).digest() == digest


@lru_cache(maxsize=4)
def _version(compiler: str) -> str:
    try:
        return subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{compiler} does not run: {error}") from error


@lru_cache(maxsize=4)
def _read(folder: Path, files: tuple[str, ...]) -> Sources:
    return tuple((name, (folder / name).read_bytes()) for name in files)
