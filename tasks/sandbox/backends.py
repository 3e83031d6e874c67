"""The sandbox backends of this machine, strongest first: bubblewrap, then Landlock.

Bubblewrap gives the program its own root file system: a read-only /usr and 32 MB of /tmp, and
namespaces without network, other processes, /proc and /dev.

If bubblewrap is missing or user namespaces are forbidden, as in many containers, Landlock restricts
access to files. With both the process restricts itself further (see landlock.py).
"""

import functools
import importlib.util
import json
import marshal
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.base import TaskError
from tasks.sandbox import child
from tasks.sandbox import landlock as sandbox_confine
from tasks.sandbox.seccomp import OWN_NUMBER, syscall_filter

USER = 61234  # user and group of programs that root starts; it owns no file and no process
TMP_BYTES = 32 << 20
NUM_PROCESSES = 8  # threads, under bubblewrap, whose init process counts
NUM_OPEN_FILES = 64
FILE_BYTES = 16 << 20

Kind = Literal["bubblewrap", "landlock"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One backend and its settings; all paths are absolute."""

    kind: Kind
    python: str
    compiled: bool  # True if that interpreter can load bytecode of ours
    before: tuple[str, ...] = ()  # command prefix of the interpreter: dropping rights, bubblewrap
    user: int | None = None  # user to switch to inside; None means it is switched before
    landlock: int = 0  # the version to use; 0 means none
    readable: tuple[str, ...] = ()  # with Landlock


def command_of(way: Way) -> list[str]:
    """Return the command that starts an interpreter in a sandbox, which waits for its order."""
    # -I -S: no environment variables, no site packages; -B: no bytecode files.
    return [*way.before, way.python, "-I", "-S", "-B", "-X", "utf8", "-c", _code(way.compiled)]


def order_for(way: Way, *, seconds: float, memory_mb: int) -> dict[str, Any]:
    """Return the limits and restrictions that each process of a sandbox sets first."""
    limits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": math.ceil(seconds) + 1,  # after the deadline, which gives a better reason
        "RLIMIT_AS": memory_mb << 20,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": NUM_OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
    }
    namespaces = way.kind == "bubblewrap"
    # RLIMIT_NPROC counts per user: only in a user namespace that is this sandbox alone.
    if namespaces:
        limits["RLIMIT_NPROC"] = NUM_PROCESSES
    confine = {
        "user": way.user,
        "landlock": way.landlock,
        "readable": way.readable,
        "filter": syscall_filter(os.uname().machine, own_files_and_threads=namespaces).hex(),
        "own": OWN_NUMBER.to_bytes(4, "little").hex(),
    }
    return {"limits": limits, "confine": confine}


def programs() -> Mapping[str, str | None]:
    """Return the programs that a backend may need, with their paths; None means missing."""
    names = ("bwrap", "setpriv") if os.geteuid() == 0 else ("bwrap",)
    return {name: shutil.which(name) for name in names}


def ways(found: Mapping[str, str | None]) -> Iterator[Way | str]:
    """Yield all backends, strongest first; for one that is unavailable, the reason instead.

    Raises TaskError if there is no filter for this processor, or no interpreter.
    """
    if sys.platform != "linux":
        raise TaskError(
            f"model-written code runs in a sandbox only, and there is none for {sys.platform}"
        )
    syscall_filter(os.uname().machine, own_files_and_threads=False)
    as_root = os.geteuid() == 0
    python, folders = _interpreter(as_user=not as_root)
    compiled = _reads_our_bytecode(python)
    missing = [name for name, path in found.items() if path is None]
    if missing:
        yield f"{' and '.join(missing)} not installed"
    else:
        drop: tuple[str, ...] = ()
        # Before bubblewrap, not inside: in a namespace made by root, visible files of root's belong
        # to the sandbox's root, above all the kernel's settings in /proc/sys.
        if as_root:
            user = f"--reuid={USER}", f"--regid={USER}", "--clear-groups"
            rights = "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"
            drop = (str(found["setpriv"]), *user, *rights, "--")
        bwrap = str(found["bwrap"])
        before = (*drop, bwrap, *_options(bwrap, folders), "--")
        yield Way(kind="bubblewrap", python=python, compiled=compiled, before=before)
    version = sandbox_confine.landlock_version()
    if version == 0:
        yield "Landlock is not in this kernel, or not allowed"
        return
    readable = tuple(path for path in ("/usr", "/lib", "/lib64", *folders) if os.path.exists(path))
    yield Way(
        kind="landlock",
        python=python,
        compiled=compiled,
        user=USER if as_root else None,
        landlock=version,
        readable=readable,
    )


@functools.cache
def _code(compiled: bool) -> str:
    """Return the argument of `python -c`: the code that runs inside, as bytecode if possible."""
    sources = [Path(m.__file__ or "").read_text() for m in (sandbox_confine, child)]
    if not compiled:
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
    if not Path("/usr/bin/python3").exists():
        raise TaskError(
            f"model-written code runs as user {USER}, who can read neither {python} nor "
            "/usr/bin/python3 (install python3)"
        )
    return "/usr/bin/python3", ()


def _for_everybody(path: Path) -> bool:
    """Return whether any user can access and read a path."""
    path = path.resolve()
    return (
        path.exists()
        and bool(path.stat().st_mode & 0o004)
        and all(folder.stat().st_mode & 0o001 for folder in path.parents)
    )


@functools.cache
def _reads_our_bytecode(python: str) -> bool:
    ask = "import importlib.util, sys\nprint(sys.implementation.name, importlib.util.MAGIC_NUMBER)"
    done = subprocess.run([python, "-I", "-S", "-c", ask], capture_output=True, text=True, env={})
    return done.stdout.strip() == f"{sys.implementation.name} {importlib.util.MAGIC_NUMBER}"


def _options(bwrap: str, folders: Sequence[str]) -> tuple[str, ...]:
    known = subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    options += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
    if "--disable-userns" in known:  # since 0.8
        options.append("--disable-userns")
    if "--size" in known:  # since 0.7; without a limit a tmpfs could fill the memory
        options += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    else:
        options += ["--dir", "/tmp"]
    for name in ("/usr", *folders):  # after /tmp, which may contain the interpreter
        options += ["--ro-bind", name, name]
    for name in ("/bin", "/lib", "/lib64"):  # links into /usr on most systems
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    return (*options, "--chdir", "/tmp", "--remount-ro", "/")


def message(order: Mapping[str, object], nonce: str) -> bytes:
    """Return an order as bytes for standard input, with the nonce if it gives the verdict."""
    # The process under test must not have the nonce: it could write it and pass.
    body = json.dumps(order).encode()
    return b"%d\n%b%b" % (len(body), body, f"{nonce}\n".encode() if "verdict" in order else b"")
