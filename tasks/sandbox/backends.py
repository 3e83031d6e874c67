"""The sandbox backends of this machine, strongest first: bubblewrap, then Landlock.

Bubblewrap gives the program its own root file system: a read-only /usr and 32 MB of /tmp, and
namespaces without network, other processes, /proc and /dev.

If bubblewrap is missing or user namespaces are forbidden, as in many containers, Landlock restricts
access to files. With both the process restricts itself further (see landlock.py).
"""

import functools
import marshal
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.base import TaskError
from tasks.sandbox import child, landlock
from tasks.sandbox.seccomp import OWN_NUMBER, syscall_filter

USER = 61234  # user and group of programs that root starts; it owns no file and no process
TMP_BYTES = 32 << 20
NUM_PROCESSES = 8  # threads, under bubblewrap, whose init process counts
NUM_OPEN_FILES = 64
FILE_BYTES = 16 << 20

_SYSTEM_PYTHON = "/usr/bin/python3"

Kind = Literal["bubblewrap", "landlock"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to isolate a process, and its settings; all paths are absolute."""

    kind: Kind
    command: tuple[str, ...]  # starts an interpreter that executes the order on standard input
    landlock: int = 0  # the version to use; 0 means none
    readable: tuple[str, ...] = ()  # with Landlock
    why: tuple[str, ...] = ()  # why each stronger kind is unavailable, once that is tested


def restrictions(backend: Backend, *, seconds: float, memory_mb: int) -> dict[str, Any]:
    """Return the limits and restrictions that each process of a sandbox sets first."""
    limits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": math.ceil(seconds) + 1,  # after the deadline, which gives a better reason
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": NUM_OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
    }
    namespaces = backend.kind == "bubblewrap"
    # RLIMIT_NPROC counts per user: only in a user namespace that is this sandbox alone.
    if namespaces:
        limits["RLIMIT_NPROC"] = NUM_PROCESSES
    confine = {
        "landlock": backend.landlock,
        "readable": backend.readable,
        "filter": syscall_filter(os.uname().machine, own_files_and_threads=namespaces).hex(),
        "own": OWN_NUMBER.to_bytes(4, "little").hex(),
    }
    return {"limits": limits, "confine": confine}


def find_backends() -> Iterator[Backend | str]:
    """Yield all backends, strongest first; for one that is unavailable, the reason instead.

    Raises TaskError if there is no filter for this processor, or no interpreter.
    """
    if sys.platform != "linux":
        raise TaskError(
            f"model-written code runs in a sandbox only, and there is none for {sys.platform}"
        )
    syscall_filter(os.uname().machine, own_files_and_threads=False)
    python, folders = _interpreter(as_user=os.geteuid() != 0)
    # -I -S: no environment variables, no site packages; -B: no bytecode files.
    command = python, "-I", "-S", "-B", "-X", "utf8", "-c", _code(ours=python != _SYSTEM_PYTHON)
    if bwrap := shutil.which("bwrap"):
        yield Backend(kind="bubblewrap", command=(bwrap, *_options(folders), "--", *command))
    else:
        yield "bwrap not installed"
    if version := landlock.landlock_version():
        paths = ("/usr", "/lib", "/lib64", *folders)
        readable = tuple(path for path in paths if os.path.exists(path))
        yield Backend(kind="landlock", command=command, landlock=version, readable=readable)
    else:
        yield "Landlock is not in this kernel, or not allowed"


@functools.cache
def _code(*, ours: bool) -> str:
    """Return the argument of `python -c`: the code that runs inside.

    It is bytecode for an interpreter of our version, as compiling takes as long as its start.
    """
    sources = [Path(module.__file__ or "").read_text() for module in (landlock, child)]
    if not ours:
        return "\n".join(sources)
    code = [compile(source, "<sandbox>", "exec", optimize=2) for source in sources]
    data = marshal.dumps(code).hex()
    return f"import marshal\nfor code in marshal.loads(bytes.fromhex('{data}')): exec(code)"


def _interpreter(*, as_user: bool) -> tuple[str, tuple[str, ...]]:
    """Return an interpreter that the sandbox's user can read, and the paths it needs besides /usr.

    Preferably this process's own, without a virtual environment's site packages.
    """
    prefix = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python, library = prefix / "bin" / version, prefix / "lib"
    if as_user or all(_for_everybody(path) for path in (python, library / version)):
        if prefix.is_relative_to("/usr"):
            return str(python), ()
        if python.is_file() and library.is_dir():
            return str(python), (str(python), str(library))
    if not Path(_SYSTEM_PYTHON).exists():
        raise TaskError(
            f"model-written code runs as user {USER}, who can read neither {python} nor "
            f"{_SYSTEM_PYTHON} (install python3)"
        )
    return _SYSTEM_PYTHON, ()


def _for_everybody(path: Path) -> bool:
    """Return whether any user can access and read a path."""
    path = path.resolve()
    return (
        path.exists()
        and bool(path.stat().st_mode & 0o004)
        and all(folder.stat().st_mode & 0o001 for folder in path.parents)
    )


def _options(folders: tuple[str, ...]) -> list[str]:
    """Return bubblewrap's options; version 0.8 has them all."""
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    options += ["--new-session", "--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    # Without a size a tmpfs could fill the memory.
    options += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    for name in ("/usr", *folders):  # after /tmp, which may contain the interpreter
        options += ["--ro-bind", name, name]
    for name in ("/bin", "/lib", "/lib64"):  # links into /usr on most systems
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    return [*options, "--chdir", "/tmp", "--remount-ro", "/"]
